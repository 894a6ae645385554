"""The random states of one rank, as JSON: Python's, NumPy's, torch's, and the accelerator's if there is one."""

import base64
import json
import random
from typing import Any

import numpy as np
import torch


def capture() -> bytes:
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],  # pyright: ignore[reportAttributeAccessIssue]
        "torch": _pack(torch.get_rng_state()),
    }
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        state[device.type] = _pack(torch.get_device_module(device).get_rng_state())
    return json.dumps(state, separators=(",", ":")).encode()


def restore(data: bytes) -> None:
    state = json.loads(data)
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_unpack(state["torch"]))
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        if device.type in state:
            torch.get_device_module(device).set_rng_state(_unpack(state[device.type]))


def _pack(state: torch.Tensor) -> str:
    return base64.b85encode(state.numpy().tobytes()).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b85decode(text)), dtype=torch.uint8)
