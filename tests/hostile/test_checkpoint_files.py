"""A checkpoint whose manifest has a right checksum and a hostile content is refused, and reads nothing outside."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from launch.cli import main
from tests.data_pipeline.sets import tree
from train.checkpoint.format.manifest import MANIFEST, DamagedError
from train.checkpoint.format.reader import Reader
from train.checkpoint.format.verify import find_faults, read_attachment, read_manifest
from train.checkpoint.stores.local import LocalFolder, LocalRoot
from train.errors import CheckpointError

CHECKPOINT = Path(__file__).parents[1] / "earlier_version" / "run" / "checkpoints" / "step-00000004"
SHARD = "shard-00000.safetensors"
EMBED = "model.embed.weight"
TRAILER_BYTES = 29


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be changed."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "run" / "checkpoints" / CHECKPOINT.name))


def forge(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest and computes its checksum again."""
    content = json.loads((folder / MANIFEST).read_bytes())
    edit(content)
    content.pop("xxh3", None)
    body = json.dumps(content, separators=(",", ":"))[:-1].encode()
    (folder / MANIFEST).write_bytes(body + f',\n"xxh3":"{xxhash.xxh3_64_hexdigest(body)}"}}\n'.encode())


def piece(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"][EMBED]["pieces"][0]


def halves(content: dict[str, Any], second: list[int], rows: int) -> None:
    """Cuts the embedding, which has 384 rows of 16, into two pieces."""
    whole = piece(content)
    first = whole | {"sizes": [192, 16]}
    other = whole | {"offsets": second, "sizes": [rows, 16], "start": whole["start"] + 192 * 64}
    content["tensors"][EMBED]["pieces"] = [first, other]


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no block checksums": lambda m: piece(m).update(xxh3=[]),
    "too many block checksums": lambda m: piece(m).update(xxh3=piece(m)["xxh3"] * 2),
    "a checksum that is none": lambda m: piece(m).update(xxh3=["x"]),
    "a tensor without pieces": lambda m: m["tensors"][EMBED].update(pieces=[]),
    "rows that no piece has": lambda m: m["tensors"][EMBED].update(shape=[400, 16]),
    "pieces that overlap": lambda m: halves(m, [100, 0], 192),
    "pieces that leave a gap": lambda m: halves(m, [192, 0], 100),
    "a piece twice": lambda m: m["tensors"][EMBED].update(pieces=[piece(m), piece(m)]),
    "negative sizes": lambda m: piece(m).update(sizes=[-384, -16]),
    "negative offsets": lambda m: piece(m).update(offsets=[-1, 0]),
    "an offset beyond the tensor": lambda m: piece(m).update(offsets=[384, 0]),
    "a negative start": lambda m: piece(m).update(start=-8192),
    "a huge start": lambda m: piece(m).update(start=2**63),
    "a start of another piece": lambda m: piece(m).update(start=piece(m)["start"] + 64),
    "a huge shape": lambda m: m["tensors"][EMBED].update(shape=[2**40, 2**40]),
    "a huge shape of no elements": lambda m: m["tensors"][EMBED].update(shape=[0, 2**62], pieces=[]),
    "too few dimensions": lambda m: piece(m).update(offsets=[0], sizes=[6144]),
    "a shape that is a number": lambda m: m["tensors"][EMBED].update(shape=384),
    "true for a number": lambda m: piece(m).update(file=False),
    "an unknown type": lambda m: m["tensors"][EMBED].update(dtype="F7"),
    "a type that is a list": lambda m: m["tensors"][EMBED].update(dtype=["F32"]),
    "a smaller type": lambda m: m["tensors"][EMBED].update(dtype="F16"),
    "a larger type": lambda m: m["tensors"][EMBED].update(dtype="F64"),
    "a file that is not listed": lambda m: piece(m).update(file=1),
    "a negative file": lambda m: piece(m).update(file=-1),
    "a piece that is a text": lambda m: m["tensors"][EMBED].update(pieces=["x"]),
    "no files": lambda m: m.update(files=[]),
    "a file twice": lambda m: m.update(files=m["files"] * 2),
    "a header larger than the file": lambda m: m["files"][0].update(header_bytes=10**9),
    "more bytes than pieces": lambda m: m["files"][0].update(bytes=10**12),
    "a huge attachment": lambda m: m.update(attachments=[{"name": "tokenizer/x", "bytes": 2**40, "xxh3": "0" * 16}]),
    "a negative step": lambda m: m.update(step=-3),
    "a step that is no number": lambda m: m.update(step=1e30),
    "a loss that is a text": lambda m: m.update(held_out_loss="low"),
    "an identity that is a list": lambda m: m.update(identity=[]),
    "a rank state that is a number": lambda m: m.update(rank_states=[1]),
    "versions that are numbers": lambda m: m.update(versions={"torch": 2}),
    "a name with control characters": lambda m: m["tensors"].update({"model.\x1b[2J": m["tensors"].pop(EMBED)}),
    "a missing member": lambda m: m.pop("extra"),
    "deep nesting": lambda m: m["extra"].update(json.loads('{"a":' * 80 + "1" + "}" * 80)),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_checkpoint_is_refused_in_one_line(
    folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(folder, FORGERIES[name])
    with pytest.raises(DamagedError, match=r"manifest.json: .*") as caught:
        read_manifest(LocalFolder(folder))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000
    for command in (["verify", str(folder)], ["copy", str(folder), str(tmp_path / "copy")], ["show", str(folder)]):
        capsys.readouterr()
        assert main(["checkpoint", *command]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "copy").exists()


TENSOR_FORGERIES = [name for name in list(FORGERIES)[:26] if name != "a smaller type"]


@pytest.mark.parametrize("name", TENSOR_FORGERIES)
def test_the_short_reader_keeps_to_the_same_rules(folder: Path, name: str) -> None:
    forge(folder, FORGERIES[name])
    with pytest.raises(ValueError, match=r"."):
        Reader(folder)[EMBED]


@pytest.mark.parametrize("tensors", [14173, [EMBED], None])
def test_the_short_reader_refuses_tensors_of_another_type(folder: Path, tensors: object) -> None:
    forge(folder, lambda m: m.update(tensors=tensors))
    with pytest.raises(ValueError, match=r"the manifest is wrong"):
        Reader(folder)


def test_the_short_reader_refuses_two_tensors_of_the_same_bytes(folder: Path) -> None:
    forge(folder, lambda m: m["tensors"].update({"model.copy": m["tensors"][EMBED]}))
    with pytest.raises(ValueError, match=r"two pieces have bytes in common"):
        Reader(folder)


def test_a_manifest_of_another_step_than_its_folder_is_refused(folder: Path) -> None:
    forge(folder, lambda m: m.update(step=4294967300))
    with pytest.raises(DamagedError, match=r"it is of step 4294967300, in a folder named step-"):
        read_manifest(LocalFolder(folder))


def test_names_of_an_identity_that_messages_could_not_show_are_refused(folder: Path) -> None:
    forge(folder, lambda m: m["identity"]["model"].update({"\r\n": 1}))
    with pytest.raises(DamagedError, match=r"the identity has a member named '\\r\\n'"):
        read_manifest(LocalFolder(folder))


NAMES = ["/etc/hostname", "../../private", "..", "x/../../../private", ".hidden", "a\nb", "", "link", 7]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_out_reads_nothing(folder: Path, tmp_path: Path, name: object) -> None:
    """Such names once read private files into an export."""
    private = tmp_path / "run" / "private"
    shutil.copy(folder / SHARD, private)
    (folder / "link").symlink_to(private)
    before = tree(tmp_path)
    forge(folder, lambda m: m["files"][0].update(name=name))
    assert find_faults(LocalFolder(folder))
    with pytest.raises(ValueError, match=r"."):
        Reader(folder)[EMBED]
    assert main(["export", str(folder), "--out", str(tmp_path / "exported")]) == 2
    assert not (tmp_path / "exported").exists()
    assert tree(tmp_path).keys() == before.keys()


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../private", "tokenizer/../../private", "tokenizer/link", "private"]
)
def test_an_attachment_outside_of_the_checkpoint_is_not_read(folder: Path, tmp_path: Path, name: str) -> None:
    private = folder.parent / "private"
    private.write_bytes(b"private")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "link").symlink_to(private)
    entry = {"name": name, "bytes": 7, "xxh3": xxhash.xxh3_64_hexdigest(b"private")}
    forge(folder, lambda m: m.update(attachments=[entry]))
    with pytest.raises(CheckpointError):
        read_first_attachment(folder)
    assert main(["generate", str(folder), "--prompt", "x"]) == 2


def read_first_attachment(folder: Path) -> bytes:
    manifest, _ = read_manifest(LocalFolder(folder))
    return read_attachment(LocalFolder(folder), manifest.attachments[0])


@pytest.mark.parametrize("name", [MANIFEST, SHARD])
def test_a_fifo_in_a_checkpoint_does_not_hang(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert any("is a FIFO" in fault for fault in find_faults(LocalFolder(folder)))
    with pytest.raises((ValueError, OSError)):
        Reader(folder)[EMBED]
    for command in ("verify", "show", "ls") if name == MANIFEST else ("verify",):
        assert main(["checkpoint", command, str(folder)]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_manifest_of_ten_gigabytes_is_not_read(folder: Path) -> None:
    with (folder / MANIFEST).open("wb") as file:
        file.truncate(10 * 10**9)  # a hole: it takes no space
    with pytest.raises(DamagedError, match=r"has 10,000,000,000 bytes, more than the 1,073,741,824"):
        read_manifest(LocalFolder(folder))
    with pytest.raises(ValueError, match=r"larger than 1073741824 bytes"):
        Reader(folder)


def test_a_forged_checkpoint_among_good_ones_does_not_hide_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, folder.with_name("step-00000005"))
    forge(folder.with_name("step-00000005"), lambda m: m.update(step=5))
    forge(folder, lambda m: m["files"][0].update(name="/etc/hostname"))
    assert main(["checkpoint", "ls", str(folder.parent)]) == 0
    listed = capsys.readouterr().out
    assert "damaged: manifest.json" in listed
    assert "5.9222" in listed


def test_a_folder_with_digits_of_another_script_or_too_many_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("step-\uff10\uff10\uff10\uff10\uff10\uff10\uff10\uff15", f"step-{'9' * 100}"):
        (tmp_path / name).mkdir()
    assert LocalRoot(tmp_path).steps() == []
