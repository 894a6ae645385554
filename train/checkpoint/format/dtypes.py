"""Tensors as safetensors files have them: the names of element types, and a tensor's bytes."""

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""safetensors' name of each torch type."""


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
