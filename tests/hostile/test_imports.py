"""The checkpoint of another system runs no code, leads nowhere else, and is refused in one line if it is damaged."""

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from launch.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A Hugging Face folder with an index. It has only one tensor: each test ends before that matters."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.embed_tokens.weight": torch.zeros(40, 16)}, folder / "model-00001-of-00001.safetensors")
    write_index(folder, "model-00001-of-00001.safetensors")
    return folder


def write_index(folder: Path, file: object) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refusal(capsys: pytest.CaptureFixture[str], source: Path, kind: str, *options: str) -> str:
    """The one line with which an import ends, with exit code 2. Nothing is written."""
    target = source.parent / "run"
    assert main(["checkpoint", "import", str(source), str(target), "--from", kind, *options]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("keepstep: ")]
    assert not target.exists()
    return line


@pytest.mark.parametrize(
    "name", ["../private.safetensors", "/etc/passwd", "x/../../private", "", None, 7, ["x"], "a\nb"]
)
def test_an_index_cannot_name_a_file_elsewhere(theirs: Path, capsys: pytest.CaptureFixture[str], name: object) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(40, 16)}, theirs.parent / "private.safetensors")
    write_index(theirs, name)
    assert "is not safe" in refusal(capsys, theirs, "huggingface")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ['{"a":' * 5000, "[]", "null", "{", "\0", '{"weight_map": [1]}'])
def test_damaged_json_is_one_line(theirs: Path, capsys: pytest.CaptureFixture[str], name: str, content: str) -> None:
    (theirs / name).write_text(content)
    refusal(capsys, theirs, "huggingface")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_metadata_of_ten_gigabytes_is_not_read(theirs: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    with (theirs / name).open("wb") as file:
        file.truncate(10 * 10**9)  # a hole: it takes no space
    assert "has 10,000,000,000 bytes" in refusal(capsys, theirs, "huggingface")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors"])
def test_a_fifo_does_not_hang_an_import(theirs: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (theirs / name).unlink()
    os.mkfifo(theirs / name)
    refusal(capsys, theirs, "huggingface")


@pytest.mark.parametrize("size", [0, 7, 20, 2000])
def test_damaged_safetensors_are_one_line(theirs: Path, capsys: pytest.CaptureFixture[str], size: int) -> None:
    file = theirs / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "cannot be read as a huggingface checkpoint" in refusal(capsys, theirs, "huggingface")


class Attack:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of DCP."""
    folder = tmp_path / "dcp"
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=folder, no_dist=True)
    return folder


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def test_the_metadata_of_dcp_runs_no_code(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = metadata_of(saved)
    found.planner_data = Attack(saved.parent / "ran")
    (saved / ".metadata").write_bytes(pickle.dumps(found))
    assert "names posix.mkdir, which is not a class of DCP" in refusal(capsys, saved, "dcp")
    assert "names posix.mkdir" in refusal(capsys, saved, "dcp", "--trust")
    assert not (saved.parent / "ran").exists()


def test_the_tensors_of_dcp_run_no_code(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = metadata_of(saved)
    attack = io.BytesIO()
    torch.save(Attack(saved.parent / "ran"), attack)
    (saved / "__0_0.distcp").write_bytes(attack.getvalue())
    for info in found.storage_data.values():
        info.offset, info.length = 0, len(attack.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(found))
    refusal(capsys, saved, "dcp")
    assert not (saved.parent / "ran").exists()


@pytest.mark.parametrize("name", ["../private", "/etc/passwd", "link"])
def test_the_metadata_of_dcp_cannot_name_a_file_elsewhere(
    saved: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (saved.parent / "private").write_bytes((saved / "__0_0.distcp").read_bytes())
    (saved / "link").symlink_to(saved.parent / "private")
    found = metadata_of(saved)
    for info in found.storage_data.values():
        info.relative_path = name
    (saved / ".metadata").write_bytes(pickle.dumps(found))
    assert "is not safe" in (line := refusal(capsys, saved, "dcp")) or "leads out of" in line


def test_tensors_larger_than_the_files_take_no_memory(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = metadata_of(saved)
    found.state_dict_metadata["model.w"].size = torch.Size([2**40])
    (saved / ".metadata").write_bytes(pickle.dumps(found))
    assert "bytes of tensors, but its files have" in refusal(capsys, saved, "dcp")


@pytest.mark.parametrize("content", [b"", b"text", b"\x80\x04N.", b"\x80\x04}."])
def test_damaged_metadata_of_dcp_is_one_line(saved: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    (saved / ".metadata").write_bytes(content)
    assert "cannot be read as a dcp checkpoint" in refusal(capsys, saved, "dcp")


def test_damaged_tensors_of_dcp_are_one_line(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "__0_0.distcp").write_bytes(bytes(len((saved / "__0_0.distcp").read_bytes())))
    assert "cannot be read as a dcp checkpoint" in refusal(capsys, saved, "dcp")


@pytest.mark.parametrize(("kind", "name"), [("universal", "latest_universal"), ("deepspeed", "latest")])
def test_the_latest_step_of_deepspeed_is_a_folder_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "private" / "zero").mkdir(parents=True)
    for text in ("../private", str(tmp_path / "private")):
        (tmp_path / "theirs" / name).write_text(text)
        assert "is not safe" in refusal(capsys, tmp_path / "theirs", kind, "--trust")


def test_damaged_tensors_of_a_universal_checkpoint_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs" / "zero" / "w").mkdir(parents=True)
    (tmp_path / "theirs" / "zero" / "w" / "fp32.pt").write_text("text")
    assert "cannot be read as a universal checkpoint" in refusal(capsys, tmp_path / "theirs", "universal", "--trust")
