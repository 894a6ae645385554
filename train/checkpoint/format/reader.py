"""Reads any whole tensor of a checkpoint with NumPy alone, for notebooks and other tools.

    checkpoint = Reader("runs/laptop/checkpoints/step-00001000")
    checkpoint.names()                       # 'model.embed.weight', 'optim.embed.weight.exp_avg', ...
    checkpoint["model.embed.weight"]         # a NumPy array

This file needs nothing else of Keepstep, so you can copy it. The package xxhash verifies the checksums; without it,
pass `verify=False`. docs/checkpoint-format.md describes the format.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "?",
}  # fmt: skip
_TRAILER_BYTES = len(',\n"xxh3":"0123456789abcdef"}\n')


class Reader:
    """One checkpoint folder. ValueError if bytes do not match their checksum; the message names the file."""

    def __init__(self, folder: str | Path, verify: bool = True) -> None:
        self.folder = Path(folder)
        self.verify = verify
        data = (self.folder / "manifest.json").read_bytes()
        self.manifest: dict[str, Any] = json.loads(data)
        """The manifest as JSON: step, tokens, identity, ..."""
        if self.manifest["format"] != "keepstep-checkpoint" or self.manifest["version"] != 1:
            raise ValueError(f"{folder}: not a Keepstep checkpoint of version 1")
        self._check(data[:-_TRAILER_BYTES], self.manifest["xxh3"], "manifest.json")

    def names(self) -> list[str]:
        """Names of the tensors of the training state. Random states of earlier versions (`rng.*`) are left out."""
        return [name for name in self.manifest["tensors"] if not name.startswith("rng.")]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return tuple(self.manifest["tensors"][name]["shape"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The whole tensor. bfloat16 is returned as float32, which represents it exactly."""
        tensor = self.manifest["tensors"][name]
        whole = np.empty(tensor["shape"], dtype=_TYPES[tensor["dtype"]])
        for piece in tensor["pieces"]:
            box = tuple(slice(o, o + size) for o, size in zip(piece["offsets"], piece["sizes"], strict=True))
            whole[box] = self._read(name, piece, whole.dtype)
        if tensor["dtype"] == "BF16":
            return (whole.astype(np.uint32) << 16).view(np.float32)
        return whole

    def _read(self, name: str, piece: dict[str, Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        path = self.folder / self.manifest["files"][piece["file"]]["name"]
        size = math.prod(piece["sizes"]) * dtype.itemsize
        with path.open("rb") as file:
            file.seek(piece["start"])
            data = file.read(size)
        if len(data) != size:
            raise ValueError(f"{path}: {name}: the file is too short")
        block = self.manifest["block_bytes"]
        for number, expected in enumerate(piece["xxh3"]):
            self._check(data[number * block : (number + 1) * block], expected, f"{path}: {name}")
        return np.frombuffer(data, dtype=dtype).reshape(piece["sizes"])

    def _check(self, data: bytes, expected: str, what: str) -> None:
        if self.verify:
            import xxhash

            if xxhash.xxh3_64_hexdigest(data) != expected:
                raise ValueError(f"{what}: does not match its checksum")
