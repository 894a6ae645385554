"""Checkpoints in an object store: the manifest, written last, commits a checkpoint."""

from collections.abc import Iterator

import fsspec
import pytest
import torch

from train.checkpoint.format.verify import find_faults
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.stores.object_store import ObjectFolder, ObjectRoot
from train.config import CheckpointConfig

URL = "memory://run/checkpoints"


@pytest.mark.filterwarnings("ignore")  # moto, botocore and s3fs warn
def test_an_s3_bucket_stores_checkpoints(monkeypatch) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    fsspec.filesystem("s3").mkdir("bucket")
    url = "s3://bucket/run/checkpoints"
    manager = CheckpointManager(url, CheckpointConfig(keep_last=2), {}, lambda *_, **__: None)
    for step in (1, 2, 3):
        save(manager, step)
    assert load(manager) == (3, 3.0)
    assert ObjectRoot(url).steps() == [2, 3]
    store = fsspec.filesystem("s3")
    (shard,) = store.glob("bucket/run/checkpoints/step-00000003/*/shard-00000.safetensors")
    store.pipe_file(shard, store.cat_file(shard)[:-1])
    assert load(manager) == (2, 2.0)
    manager.close()
    server.stop()


@pytest.fixture
def manager() -> Iterator[CheckpointManager]:
    fsspec.filesystem("memory").store.clear()
    manager = CheckpointManager(URL, CheckpointConfig(keep_last=2), {}, lambda *_, **__: None)
    yield manager
    manager.close()
    fsspec.filesystem("memory").store.clear()


def save(manager: CheckpointManager, step: int, value: float | None = None) -> None:
    manager.save(SavedProgress(step, step), {"model.w": torch.full((9, 3), float(value or step))}, {})
    manager.wait()


def load(manager: CheckpointManager) -> tuple[int, float]:
    fresh = torch.zeros(9, 3)
    loaded = manager.load_newest({"model.w": fresh})
    assert loaded is not None
    assert (fresh == fresh[0, 0]).all()
    return loaded.progress.step, fresh[0, 0].item()


def test_a_saved_state_loads_again(manager: CheckpointManager) -> None:
    for step in (1, 2, 3):
        save(manager, step)
    assert load(manager) == (3, 3.0)
    assert ObjectRoot(URL).steps() == [2, 3]  # retention removed the first
    assert find_faults(ObjectFolder(f"{URL}/step-00000003")) == []


def test_shards_without_a_manifest_do_not_count(manager: CheckpointManager) -> None:
    save(manager, 1)
    root = ObjectRoot(URL)
    root.attempt_folder(root.begin(2)).write("abc/shard-00000.safetensors", [b"half a shard"])
    assert load(manager) == (1, 1.0)


def test_a_step_saved_again_replaces_its_old_checkpoint(manager: CheckpointManager) -> None:
    save(manager, 1)
    save(manager, 1, value=5)
    assert load(manager) == (1, 5.0)
    assert len(fsspec.filesystem("memory").ls("run/checkpoints/step-00000001")) == 2  # a manifest, one folder of shards


def test_a_failed_save_leaves_nothing_and_the_old_checkpoint_loads(manager: CheckpointManager, monkeypatch) -> None:
    save(manager, 1)

    def fail(*_: object) -> None:
        raise OSError("the store refuses the write")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectFolder, "write", fail)
        save(manager, 2)
    assert load(manager) == (1, 1.0)
    assert ObjectRoot(URL).steps() == [1]


def test_a_damaged_checkpoint_is_quarantined_and_the_one_before_loads(manager: CheckpointManager) -> None:
    save(manager, 1)
    save(manager, 2)
    store = fsspec.filesystem("memory")
    (shard,) = store.glob("run/checkpoints/step-00000002/*/shard-00000.safetensors")
    data = bytearray(store.cat_file(shard))
    data[4100] ^= 8
    store.pipe_file(shard, bytes(data))
    assert load(manager) == (1, 1.0)
    assert ObjectRoot(URL).steps() == [1]
    assert len(ObjectRoot(URL).quarantined()) == 1


def test_an_abandoned_attempt_is_removed_when_it_is_old(manager: CheckpointManager, monkeypatch) -> None:
    save(manager, 1)
    abandoned = ObjectFolder(f"{URL}/step-00000007")
    abandoned.write("0123abcd/shard-00000.safetensors", [b"half"])
    root = ObjectRoot(URL)
    root.sweep()
    assert abandoned.size("0123abcd/shard-00000.safetensors") == 4, "its saver may be alive"
    quarantined = root.quarantine(1)
    monkeypatch.setattr("train.checkpoint.stores.object_store.DEAD_SECONDS", -1.0)
    save(manager, 2)  # sweeps
    assert not fsspec.filesystem("memory").find("run/checkpoints/step-00000007")
    assert root.steps() == [2]
    assert root.quarantined() == [quarantined.removeprefix("memory:/")], "what is in quarantine stays"


def test_a_store_that_fails_to_sweep_fails_no_load(manager: CheckpointManager, monkeypatch, caplog) -> None:
    save(manager, 1)
    monkeypatch.setattr(ObjectRoot, "_is_dead", lambda *_: 1 / 0)
    ObjectFolder(f"{URL}/step-00000007").write("0123abcd/shard-00000.safetensors", [b"half"])
    assert load(manager) == (1, 1.0)
    assert "abandoned checkpoints in memory://run/checkpoints could not be removed" in caplog.text
