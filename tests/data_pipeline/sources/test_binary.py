import bz2
import io
import lzma
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.sources.files import InputFile, Part
from data_pipeline.sources.readers import read_records
from data_pipeline.sources.records import ReadOptions

TEXT = b"".join(b"%d the cat sat on a mat\n" % (number**3) for number in range(500))


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(TEXT)
        archive.addfile(entry, io.BytesIO(TEXT))
    return out.getvalue()


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return out.getvalue()


@pytest.mark.parametrize("name", ["x", "x.txt", "x.jsonl"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x04\x22\x4d\x18" + TEXT, "is lz4, not text"),
        (b"7z\xbc\xaf\x27\x1c\0\4" + TEXT, "is 7z, not text"),
        (bz2.compress(TEXT), "is bzip2, not text"),
        (lzma.compress(TEXT, lzma.FORMAT_ALONE), "is lzma, not text"),
        (tar(), "is a tar archive, not text"),
        (zipped(), "is zip, not text"),
        (zlib.compress(TEXT), "is binary: .* are control characters"),
        ("".join(f"{number} cat\n" for number in range(99)).encode("utf-16-le"), "is binary: .*iconv"),
    ],
)
def test_what_is_not_text_is_refused_even_if_errors_are_replaced(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_records(InputFile(str(tmp_path / name), len(content)), Part(0), ReadOptions(on_error="replace")))


def test_a_compression_without_magic_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl.br"
    file.write_bytes(b"\x8b\x02\x80hello")
    with pytest.raises(DataError, match=r"x.jsonl.br is brotli, not text; decompress"):
        list(read_records(InputFile(str(file), 8), Part(0), ReadOptions(format="text", on_error="replace")))


def test_text_with_some_control_characters_is_text(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"a\0b " + TEXT + b"\x1b[1m")
    (record,) = read_records(InputFile(str(file), 9), Part(0), ReadOptions())
    assert record.text == file.read_text()
