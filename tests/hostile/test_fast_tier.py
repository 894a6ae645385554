"""The fast tier trusts no folder that others could have made, and a load that fails leaves nothing in use."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from train.checkpoint import private_folder
from train.checkpoint.format.manifest import checksum
from train.checkpoint.local_tier import run_name
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.config import CheckpointConfig
from train.errors import CheckpointError

IDENTITY = {"model": {"d_model": 8}, "schedule": {"steps": 10}, "data_weights": [1.0]}
ROWS = 2 * 2**20
"""Rows of 4 bytes: a tensor has two blocks, each with its own checksum."""


def state(value: float, **more: Tensor) -> dict[str, Tensor]:
    return {"model.a": torch.full((ROWS,), value), "model.b": torch.full((ROWS,), value), **more}


def open_manager(folder: Path, identity: Mapping[str, Any] = IDENTITY) -> CheckpointManager:
    config = CheckpointConfig(local_dir=str(folder / "node"), background=False)
    return CheckpointManager(folder / "shared", config, identity, lambda *_, **__: None)


def save(
    folder: Path, step: int, tensors: dict[str, Tensor], local: bool, identity: Mapping[str, Any] = IDENTITY
) -> None:
    manager = open_manager(folder, identity)
    manager.save(SavedProgress(step, step), tensors, {}, local=local)
    manager.close()


def tier_of(folder: Path) -> Path:
    return folder / "node" / run_name(str(folder / "shared"))


def spoil_the_end(checkpoint: Path) -> None:
    """Flip one bit in the last block of a shard, so that a fill fails after it has filled other tensors."""
    shard = checkpoint / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def rewrite_manifest(checkpoint: Path, **changes: Any) -> None:
    """Change members of a manifest, and give it the checksum of the changed text."""
    file = checkpoint / "manifest.json"
    document = json.loads(file.read_bytes())
    del document["xxh3"]
    body = json.dumps(document | changes, separators=(",", ":"))[:-1].encode()
    file.write_bytes(body + f',\n"xxh3":"{checksum(body)}"}}\n'.encode())


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_manager(folder).load_newest(state(0.0))


def test_a_damaged_copy_without_any_other_checkpoint_never_starts_from_zero_with_mixed_weights(tmp_path: Path) -> None:
    save(tmp_path, 3, state(3.0), local=True)
    spoil_the_end(tier_of(tmp_path) / "step-00000003")
    for _ in range(2):  # the next attempt must not start from zero either
        refuse(
            tmp_path, "no good checkpoint is left, and a run does not restart from step 0 by itself; .*step-00000003"
        )


def test_a_damaged_manifest_without_any_other_checkpoint_never_starts_from_zero(tmp_path: Path) -> None:
    save(tmp_path, 3, state(3.0), local=True)
    (tier_of(tmp_path) / "step-00000003" / "manifest.json").write_text("{}")
    refuse(tmp_path, "no good checkpoint is left")


def test_a_roll_back_to_a_damaged_copy_ends_the_run(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    assert manager.load_newest(state(0.0)) is None
    manager.save(SavedProgress(3, 3), state(3.0), {}, local=True)
    spoil_the_end(tier_of(tmp_path) / "step-00000003")
    with pytest.raises(CheckpointError, match="no good checkpoint is left"):
        manager.load_newest(state(4.0))
    manager.close()


def test_after_a_damaged_copy_every_tensor_comes_from_the_checkpoint_before(tmp_path: Path) -> None:
    save(tmp_path, 2, state(2.0), local=False)
    save(tmp_path, 3, state(3.0), local=True)
    spoil_the_end(tier_of(tmp_path) / "step-00000003")
    tensors = state(0.0)
    loaded = open_manager(tmp_path).load_newest(tensors)
    assert loaded is not None
    assert loaded.progress.step == 2
    assert all(torch.equal(tensor, torch.full((ROWS,), 2.0)) for tensor in tensors.values())


def test_a_tensor_that_only_the_damaged_copy_has_is_not_left_changed(tmp_path: Path) -> None:
    save(tmp_path, 2, state(2.0), local=False)
    save(tmp_path, 3, state(3.0, **{"scaler.scale": torch.tensor([3.0])}), local=True)
    spoil_the_end(tier_of(tmp_path) / "step-00000003")
    with pytest.raises(
        CheckpointError, match=r"has changed scaler.scale, which the checkpoint of step 2 does not have"
    ):
        open_manager(tmp_path).load_newest(state(0.0, **{"scaler.scale": torch.tensor([1.0])}))


def test_the_folder_of_a_run_is_its_users_alone(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    tier.mkdir(parents=True)
    tier.chmod(0o777)
    save(tmp_path, 3, state(3.0), local=True)
    assert tier.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_user_planted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 3, state(3.0), local=True)
    me = os.geteuid()
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: me + 1)
    refuse(
        tmp_path, rf"in the fast tier belongs to user {me}, not to {me + 1}.*; remove it, or set checkpoint.local_dir"
    )


def test_a_link_in_place_of_a_folder_or_a_shard_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 3, state(3.0), local=True)
    shard = tier_of(tmp_path) / "step-00000003" / "shard-00000.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    refuse(tmp_path, "shard-00000.safetensors in the fast tier is neither a file nor a folder")
    tier_of(tmp_path).rename(tmp_path / "moved")
    tier_of(tmp_path).symlink_to(tmp_path / "moved")
    refuse(tmp_path, "in the fast tier is neither a file nor a folder")


def test_a_place_where_everyone_may_rename_folders_is_refused(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node").chmod(0o777)
    refuse(tmp_path, "is writable for all and has no sticky bit")
    (tmp_path / "node").chmod(0o1777)
    assert open_manager(tmp_path).load_newest(state(0.0)) is None


def test_a_manifest_that_names_a_file_outside_deletes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 3, state(3.0), local=True)
    step = tier_of(tmp_path) / "step-00000003"
    victim = tmp_path / "node" / "victim"
    victim.write_bytes((step / "shard-00000.safetensors").read_bytes()[:-1])
    files = json.loads((step / "manifest.json").read_bytes())["files"]
    rewrite_manifest(step, files=[files[0] | {"name": "../../victim"}])
    refuse(tmp_path, "victim|no good checkpoint is left")
    assert victim.exists()


@pytest.mark.parametrize("local", [True, False])
def test_a_checkpoint_without_an_identity_is_refused(tmp_path: Path, local: bool) -> None:
    save(tmp_path, 3, state(3.0), local=local, identity={})
    folder = tier_of(tmp_path) if local else tmp_path / "shared"
    refuse(tmp_path, "does not state its data_weights and model and schedule, so it may belong to any run")
    rewrite_manifest(folder / "step-00000003", extra={"imported": {"kind": "huggingface"}})
    refuse(tmp_path, "no run of Keepstep saved there" if local else "does not state its model")
