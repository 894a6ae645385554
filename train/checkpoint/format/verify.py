"""Verifies every byte of a checkpoint against its checksums. No torch."""

from collections.abc import Iterator

from train.checkpoint.format.attachments import Attachment
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
from train.checkpoint.stores.steps import STEP


def read_manifest(folder: Folder) -> tuple[Manifest, bytes]:
    """The manifest and its bytes. DamagedError if it cannot be read, fails its checksum or is of another step."""
    try:
        data = read_all(folder, MANIFEST)
    except OSError as error:
        raise DamagedError(f"{MANIFEST}: cannot be read ({error})") from error
    manifest = decode(data)
    named = STEP.fullmatch(str(folder).rsplit("/", 1)[-1])
    if named and int(named[1]) != manifest.step:
        raise DamagedError(f"{MANIFEST}: it is of step {manifest.step}, in a folder named {named[0]}; rename it")
    return manifest, data


def check_file(folder: Folder, file: ShardFile) -> bytes:
    """The header of a shard. DamagedError if the file has the wrong size or the header fails its checksum."""
    header = _read_start(folder, file.name, file.bytes, file.header_bytes)
    if checksum(header) != file.header_checksum:
        raise DamagedError(f"{file.name}: the header does not match its checksum")
    return header


def _read_start(folder: Folder, name: str, file_bytes: int, count: int) -> bytes:
    """The first `count` bytes of a file. DamagedError if it cannot be read or has not `file_bytes` bytes."""
    try:
        size = folder.size(name)
        if size != file_bytes:
            raise DamagedError(f"{name}: has {size} bytes, not {file_bytes}")
        start = bytearray(count)
        folder.read_into(name, 0, memoryview(start))
    except OSError as error:
        raise DamagedError(f"{name}: cannot be read ({error})") from error
    return bytes(start)


def read_blocks(folder: Folder, piece: Piece, number: int, out: memoryview) -> None:
    """Fill `out` with whole blocks of a piece, from block `number` on. DamagedError if one fails its checksum."""
    at = piece.start + number * BLOCK_BYTES
    try:
        folder.read_into(piece.file, at, out)
    except OSError as error:
        raise DamagedError(f"{piece.file}: {piece.tensor}: cannot be read ({error})") from error
    for low in range(0, len(out), BLOCK_BYTES):
        block = out[low : low + BLOCK_BYTES]
        if checksum(block) != piece.checksums[number + low // BLOCK_BYTES]:
            where = f"bytes {at + low} to {at + low + len(block)}"
            raise DamagedError(f"{piece.file}: {piece.tensor}: {where} do not match their checksum")


def read_file(folder: Folder, manifest: Manifest, file: ShardFile) -> Iterator[bytes | memoryview]:
    """All bytes of a shard, block by block. DamagedError at the first block that fails its checksum."""
    yield check_file(folder, file)
    for piece in manifest.pieces_by_file[file.name]:
        for number in range(len(piece.checksums)):
            block = memoryview(bytearray(min(BLOCK_BYTES, piece.bytes - number * BLOCK_BYTES)))
            read_blocks(folder, piece, number, block)
            yield block


def read_attachment(folder: Folder, attachment: Attachment) -> bytes:
    """The content of an attachment. DamagedError if it cannot be read or fails its checksum."""
    content = _read_start(folder, attachment.name, attachment.bytes, attachment.bytes)
    if checksum(content) != attachment.checksum:
        raise DamagedError(f"{attachment.name}: the content does not match its checksum")
    return content


def find_faults(folder: Folder) -> list[str]:
    """The first fault of each damaged file of a checkpoint. Empty if every byte matches its checksum."""
    try:
        manifest, _ = read_manifest(folder)
    except DamagedError as error:
        return [str(error)]
    faults = [find_fault(folder, manifest, file) for file in manifest.files]
    for attachment in manifest.attachments:
        try:
            read_attachment(folder, attachment)
        except DamagedError as error:
            faults.append(str(error))
    return [fault for fault in faults if fault]


def find_fault(folder: Folder, manifest: Manifest, file: ShardFile) -> str:
    """The first fault of a shard; empty if every byte matches its checksum."""
    try:
        for _ in read_file(folder, manifest, file):
            pass
    except DamagedError as error:
        return str(error)
    return ""
