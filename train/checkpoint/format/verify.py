"""Checks every byte of a checkpoint against its checksums. No torch."""

from collections.abc import Iterator

from train.checkpoint.format.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    DamagedError,
    Manifest,
    Piece,
    ShardFile,
    checksum,
    decode,
)
from train.checkpoint.stores.protocol import Folder, read_all


def read_manifest(folder: Folder) -> tuple[Manifest, bytes]:
    """The manifest and its bytes. DamagedError if they are not what was written."""
    try:
        data = read_all(folder, MANIFEST)
    except OSError as error:
        raise DamagedError(f"{MANIFEST}: cannot be read ({error})") from error
    return decode(data), data


def check_file(folder: Folder, file: ShardFile) -> bytes:
    """The header. DamagedError unless the file has its size and the header is intact."""
    header = bytearray(file.header_bytes)
    try:
        size = folder.size(file.name)
        if size != file.bytes:
            raise DamagedError(f"{file.name}: has {size} bytes, not {file.bytes}")
        folder.read_into(file.name, 0, memoryview(header))
    except OSError as error:
        raise DamagedError(f"{file.name}: cannot be read ({error})") from error
    if checksum(header) != file.header_checksum:
        raise DamagedError(f"{file.name}: the header does not fit its checksum")
    return bytes(header)


def read_blocks(folder: Folder, piece: Piece, number: int, out: memoryview) -> None:
    """Fill `out` with whole blocks of a piece from the given one on. DamagedError if they are not what was written."""
    at = piece.start + number * BLOCK_BYTES
    try:
        folder.read_into(piece.file, at, out)
    except OSError as error:
        raise DamagedError(f"{piece.file}: {piece.tensor}: cannot be read ({error})") from error
    for low in range(0, len(out), BLOCK_BYTES):
        block = out[low : low + BLOCK_BYTES]
        if checksum(block) != piece.checksums[number + low // BLOCK_BYTES]:
            where = f"bytes {at + low} to {at + low + len(block)}"
            raise DamagedError(f"{piece.file}: {piece.tensor}: {where} do not fit their checksum")


def read_file(folder: Folder, manifest: Manifest, file: ShardFile) -> Iterator[bytes | memoryview]:
    """All of a shard, block by block, each checked."""
    yield check_file(folder, file)
    for piece in manifest.pieces_by_file[file.name]:
        for number in range(len(piece.checksums)):
            block = memoryview(bytearray(min(BLOCK_BYTES, piece.bytes - number * BLOCK_BYTES)))
            read_blocks(folder, piece, number, block)
            yield block


def damage(folder: Folder) -> list[str]:
    """What is wrong with a checkpoint, file by file; the first fault of each. Empty if every byte is as written."""
    try:
        manifest, _ = read_manifest(folder)
    except DamagedError as error:
        return [str(error)]
    faults = []
    for file in manifest.files:
        try:
            for _ in read_file(folder, manifest, file):
                pass
        except DamagedError as error:
            faults.append(str(error))
    return faults
