"""A Hugging Face folder is read only if it is certain which files are the model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from train.checkpoint.importing.hugging_face import INDEX, read
from train.errors import CheckpointError

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded model of two tensors with its index."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save(tmp_path / ONE, a=1.0)
    save(tmp_path / TWO, b=2.0)
    write_index(tmp_path, a=ONE, b=TWO)
    return tmp_path


def save(path: Path, **values: float) -> None:
    save_file({name: torch.full((2,), value) for name, value in values.items()}, path)


def write_index(folder: Path, **files: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def values(folder: Path) -> dict[str, float]:
    return {name: float(tensor[0]) for name, tensor in read(folder).weights.items()}


def test_with_an_index_only_its_files_are_read(folder: Path) -> None:
    save(folder / "consolidated.safetensors", a=9.0, b=9.0, c=9.0)
    assert values(folder) == {"a": 1.0, "b": 2.0}


def test_each_tensor_is_taken_from_the_file_that_the_index_names(folder: Path) -> None:
    save(folder / TWO, a=9.0, b=2.0)
    assert values(folder) == {"a": 1.0, "b": 2.0}


def test_a_whole_model_beside_an_index_of_other_files_is_refused(folder: Path) -> None:
    save(folder / "model.safetensors", a=9.0, b=9.0)
    with pytest.raises(CheckpointError, match=f"has both model.safetensors and {INDEX}.*remove the one"):
        read(folder)


def test_without_an_index_the_file_named_model_is_read(folder: Path) -> None:
    (folder / INDEX).unlink()
    save(folder / "model.safetensors", a=3.0)
    assert values(folder) == {"a": 3.0}


def test_without_an_index_a_complete_set_of_shards_is_read_and_no_other_set(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert values(folder) == {"a": 1.0, "b": 2.0}
    save(folder / "consolidated.safetensors", a=9.0)
    with pytest.raises(CheckpointError, match=r"has 3 \*.safetensors files .* and no model.safetensors.index.json"):
        read(folder)
    (folder / "consolidated.safetensors").unlink()
    (folder / ONE).rename(folder / "model-00003-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="add the index, or remove the others"):
        read(folder)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    (folder / INDEX).unlink()
    save(folder / TWO, a=9.0, b=2.0)
    with pytest.raises(CheckpointError, match="a is in two files"):
        read(folder)


def test_an_index_that_does_not_fit_its_files_is_refused(folder: Path) -> None:
    write_index(folder, a=ONE, b=TWO, c=TWO)
    with pytest.raises(CheckpointError, match=r"lists 1 tensors that no file has \(c\)"):
        read(folder)
    write_index(folder, a=ONE, b="../elsewhere.safetensors")
    with pytest.raises(CheckpointError, match=r"the name '../elsewhere.safetensors' is not safe"):
        read(folder)
    (folder / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match=r"cannot be read.*download it again"):
        read(folder)


def test_an_adapter_and_a_folder_without_a_config_are_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has an adapter \(adapter_config.json\); merge it"):
        read(folder)
    (folder / "adapter_config.json").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json with a model_type"):
        read(folder)
