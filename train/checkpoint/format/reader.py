"""Reads any whole tensor of a checkpoint with NumPy alone, for notebooks and other tools.

    checkpoint = Reader("runs/laptop/checkpoints/step-00001000")
    checkpoint.names()                       # 'model.embed.weight', 'optim.embed.weight.exp_avg', ...
    checkpoint["model.embed.weight"]         # a NumPy array

This file needs nothing else of Keepstep, so you can copy it. The package xxhash verifies the checksums; without it,
pass `verify=False`. docs/checkpoint-format.md describes the format.
"""

import json
import math
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "?",
}  # fmt: skip
_NAME = re.compile(r"([0-9a-f]{1,32}/)?[A-Za-z0-9_][A-Za-z0-9._-]*")
_WRONG = (KeyError, IndexError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError)
"""What a manifest leads to whose members are missing or of other types. It is shown as ValueError."""
_BLOCK_BYTES = 4 << 20
_LARGEST = 1 << 30
"""Bytes of a manifest, at most."""
_TRAILER_BYTES = len(',\n"xxh3":"0123456789abcdef"}\n')


class Reader:
    """One checkpoint folder.

    ValueError, which names the file, if bytes do not match their checksum, or if the manifest breaks the format's
    rules; OSError if a file cannot be read."""

    def __init__(self, folder: str | Path, verify: bool = True) -> None:
        self.folder = Path(folder)
        self.verify = verify
        path = self._file("manifest.json")
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path}: larger than {_LARGEST} bytes")
        data = path.read_bytes()
        try:
            self.manifest: dict[str, Any] = json.loads(data)
            """The manifest as JSON: step, tokens, identity, ..."""
            found = (self.manifest["format"], self.manifest["version"], self.manifest["block_bytes"])
            checksum = self.manifest["xxh3"]
        except _WRONG as error:
            raise ValueError(f"{path}: not a manifest ({error!r})"[:500]) from None
        if found != ("keepstep-checkpoint", 1, _BLOCK_BYTES):
            raise ValueError(f"{folder}: not a Keepstep checkpoint of version 1")
        self._check(data[:-_TRAILER_BYTES], checksum, "manifest.json")
        try:
            self._check_places()
        except _WRONG as error:
            raise ValueError(f"{path}: the manifest is wrong ({error!r})"[:500]) from None

    def names(self) -> list[str]:
        """Names of the tensors of the training state. Random states of earlier versions (`rng.*`) are left out."""
        return [name for name in self.manifest["tensors"] if not name.startswith("rng.")]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return tuple(self.manifest["tensors"][name]["shape"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The whole tensor. bfloat16 is returned as float32, which represents it exactly."""
        tensor = self.manifest["tensors"][name]
        try:
            return self._whole(name, tensor)
        except _WRONG as error:
            raise ValueError(f"{self.folder}: {name}: the manifest is wrong ({error!r})"[:500]) from None

    def _check_places(self) -> None:
        """ValueError if two pieces have bytes in common. `_WRONG` if the manifest has other members than expected."""
        spans: list[tuple[int, int, int]] = []
        for tensor in self.manifest["tensors"].values():
            width = np.dtype(_TYPES.get(tensor["dtype"], "u1")).itemsize
            for piece in tensor["pieces"]:
                start = piece["start"]
                spans.append((piece["file"], start, start + math.prod(piece["sizes"]) * width))
        spans.sort()
        if any(file == other and start < end for (file, _, end), (other, start, _) in pairwise(spans)):
            raise ValueError(f"{self.folder}: two pieces have bytes in common")

    def _whole(self, name: str, tensor: dict[str, Any]) -> NDArray[Any]:
        dtype, shape, pieces = np.dtype(_TYPES[tensor["dtype"]]), tuple(tensor["shape"]), tensor["pieces"]
        numbers = [*shape, *(n for piece in pieces for key in ("offsets", "sizes") for n in piece[key])]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{self.folder}: {name}: a size or offset is no whole number from 0")
        if sum(math.prod(piece["sizes"]) for piece in pieces) != math.prod(shape):
            raise ValueError(f"{self.folder}: {name}: the pieces are not as large as the tensor")
        paths = [self._place(name, piece, dtype) for piece in pieces]  # before memory is taken for the whole
        whole, filled = np.empty(shape, dtype), np.zeros(shape, bool)
        for piece, path in zip(pieces, paths, strict=True):
            box = tuple(slice(o, o + size) for o, size in zip(piece["offsets"], piece["sizes"], strict=True))
            whole[box], filled[box] = self._read(name, piece, path, dtype), True
        if not filled.all():
            raise ValueError(f"{self.folder}: {name}: the pieces do not cover the tensor")
        if tensor["dtype"] == "BF16":
            return (whole.astype(np.uint32) << 16).view(np.float32)
        return whole

    def _place(self, name: str, piece: dict[str, Any], dtype: np.dtype[Any]) -> Path:
        """The file of a piece. ValueError unless it has all bytes of the piece, and the piece all its checksums."""
        if type(piece["file"]) is not int or piece["file"] < 0:
            raise ValueError(f"{self.folder}: {name}: the number of a file is no whole number from 0")
        path = self._file(self.manifest["files"][piece["file"]]["name"])
        size = math.prod(piece["sizes"]) * dtype.itemsize
        if not 0 <= piece["start"] <= path.stat().st_size - size:
            raise ValueError(f"{path}: {name}: the file is too short")
        if len(piece["xxh3"]) != -(-size // _BLOCK_BYTES):
            raise ValueError(f"{path}: {name}: not every block has a checksum")
        return path

    def _read(self, name: str, piece: dict[str, Any], path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
        with path.open("rb") as file:
            file.seek(piece["start"])
            data = file.read(math.prod(piece["sizes"]) * dtype.itemsize)
        for number, expected in enumerate(piece["xxh3"]):
            self._check(data[number * _BLOCK_BYTES : (number + 1) * _BLOCK_BYTES], expected, f"{path}: {name}")
        return np.frombuffer(data, dtype=dtype).reshape(piece["sizes"])

    def _file(self, name: str) -> Path:
        """The path of a file of the folder. ValueError if the name or a link leads elsewhere, OSError for no file."""
        path = self.folder / name
        real = Path(os.path.realpath(path))  # unlike `resolve`, it raises nothing for a link to itself
        if not _NAME.fullmatch(name) or Path(os.path.realpath(self.folder)) not in real.parents:
            raise ValueError(f"{self.folder}: the file {name[:100]!r} is not in the folder")
        if not path.is_file():  # a FIFO, for example, which would wait for a writer
            raise FileNotFoundError(f"{path} is no file")
        return path

    def _check(self, data: bytes, expected: str, what: str) -> None:
        if self.verify:
            import xxhash

            if xxhash.xxh3_64_hexdigest(data) != expected:
                raise ValueError(f"{what}: does not match its checksum")
