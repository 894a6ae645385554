"""The manager in one process: saved states load bit for bit, and damaged ones never load."""

from pathlib import Path

import pytest
import torch

from parallel.engine import CheckpointTensor
from parallel.fragments import FlatFragment
from train.checkpoint.format.manifest import BLOCK_BYTES
from train.checkpoint.manager import CheckpointManager, SavedProgress, SavingFailedError
from train.config import CheckpointConfig
from train.errors import CheckpointError

IDENTITY = {"model": {"d_model": 8, "vocab_size": 12}, "data": {"fingerprint": "abc"}}


class Events:
    def __init__(self) -> None:
        self.list: list[tuple[str, dict]] = []

    def __call__(self, kind: str, **details: object) -> None:
        self.list.append((kind, details))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.list]


def make_state(seed: int) -> dict[str, CheckpointTensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(12, 8, generator=generator)
    flat = torch.randn(15, generator=generator)
    return {
        "model.embed.weight": weight,
        "model.norm.weight": torch.randn(8, generator=generator),
        "model.half": torch.randn(3, 5, generator=generator).bfloat16(),
        "optim.embed.weight.step": torch.tensor(float(seed)),
        "optim.flat": FlatFragment(flat, (3, 5), 0),
    }


def values(state: dict[str, CheckpointTensor]) -> dict[str, torch.Tensor]:
    return {name: (t.flat.view(t.shape) if isinstance(t, FlatFragment) else t).clone() for name, t in state.items()}


def assert_same(first: dict[str, CheckpointTensor], second: dict[str, CheckpointTensor]) -> None:
    one, two = values(first), values(second)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one), [n for n in one if not torch.equal(one[n], two[n])]


@pytest.fixture(params=[True, False], ids=["background", "foreground"])
def manager(request: pytest.FixtureRequest, tmp_path: Path):
    manager = open_manager(tmp_path, background=request.param)
    yield manager
    manager.close()


def open_manager(folder: Path, events: Events | None = None, identity=IDENTITY, allow=frozenset(), **config):
    return CheckpointManager(folder, CheckpointConfig(**config), identity, events or Events(), allow=allow)


def save(manager: CheckpointManager, step: int, loss: float | None = None) -> dict[str, CheckpointTensor]:
    state = make_state(step)
    manager.save(SavedProgress(step, step * 100, loss), state, {"read": step})
    manager.wait()
    return state


def test_a_saved_state_loads_bit_for_bit(manager: CheckpointManager) -> None:
    saved = save(manager, 7)
    state = make_state(0)
    loaded = manager.load_newest(state)
    assert loaded is not None
    assert loaded.progress == SavedProgress(7, 700)
    assert loaded.rank_states == [{"read": 7}]
    assert_same(state, saved)


def test_each_block_reports_progress(tmp_path: Path) -> None:
    calls: list[None] = []
    manager = CheckpointManager(tmp_path, CheckpointConfig(), IDENTITY, Events(), alive=lambda: calls.append(None))
    state: dict[str, CheckpointTensor] = {"model.weight": torch.ones(3 * BLOCK_BYTES // 4)}
    manager.save(SavedProgress(1, 1), state, {})
    manager.wait()
    written = len(calls)
    assert written >= 3
    assert manager.load_newest(state) is not None
    assert len(calls) > written
    manager.close()


def test_without_any_checkpoint_nothing_is_loaded(manager: CheckpointManager) -> None:
    assert manager.load_newest(make_state(0)) is None


def test_a_changed_state_does_not_reach_a_save_in_the_background(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    state = make_state(1)
    before = values(state)
    manager.save(SavedProgress(1, 1), state, {})
    for tensor in state.values():
        (tensor.flat if isinstance(tensor, FlatFragment) else tensor).zero_()
    manager.wait()
    fresh = make_state(0)
    assert manager.load_newest(fresh) is not None
    assert all(torch.equal(values(fresh)[name], before[name]) for name in before)
    manager.close()


def test_names_do_not_contain_wrappers(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    weight = torch.randn(4)
    manager.save(
        SavedProgress(1, 1), {"model._orig_mod.module._orig_mod.layers.0._checkpoint_wrapped_module.x": weight}, {}
    )
    fresh = torch.zeros(4)
    assert manager.load_newest({"model.module.layers.0.x": fresh}) is not None
    assert torch.equal(fresh, weight)
    manager.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest"])
def test_a_damaged_checkpoint_is_quarantined_and_the_one_before_is_loaded(tmp_path: Path, damage: str) -> None:
    events = Events()
    manager = open_manager(tmp_path, events)
    old = save(manager, 1)
    save(manager, 2)
    shard = tmp_path / "step-00000002" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    if damage == "flip":
        data[4096 + 5] ^= 1  # in the first tensor after the header
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(data[:-1])
    elif damage == "gone":
        shard.unlink()
    else:
        (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    state = make_state(0)
    loaded = manager.load_newest(state)
    assert loaded is not None
    assert loaded.progress.step == 1
    assert_same(state, old)
    kind, details = events.list[-1]
    assert kind == "quarantined"
    assert details["step"] == 2
    assert ("manifest.json" if damage == "manifest" else "shard-00000.safetensors") in details["error"]
    if damage == "flip":
        assert "model.embed.weight" in details["error"]
    assert (tmp_path / "step-00000001").is_dir()
    assert not (tmp_path / "step-00000002").exists()
    assert len(list(tmp_path.glob("damaged-step-00000002-*"))) == 1
    manager.close()


def test_only_damaged_checkpoints_are_an_error_even_at_the_second_try(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    save(manager, 1)
    (tmp_path / "step-00000001" / "shard-00000.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no good checkpoint is left.*damaged-step-00000001|shard-00000"):
            manager.load_newest(make_state(0))
    manager.close()


def test_a_checkpoint_of_another_run_is_refused_with_the_differences(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    save(manager, 1)
    manager.close()
    other = {"model": {"d_model": 8, "vocab_size": 13}, "data": {"fingerprint": "abd"}}
    strict = open_manager(tmp_path, identity=other)
    with pytest.raises(
        CheckpointError, match=r"data.fingerprint: 'abc' in the checkpoint, 'abd'.*model.vocab_size: 12"
    ):
        strict.load_newest(make_state(0))
    strict.close()
    padded = {**IDENTITY, "model": {"d_model": 8, "vocab_size": 13}}
    other_padding = open_manager(tmp_path, identity=padded)
    with pytest.raises(
        CheckpointError, match=r"padded to another size: 12 rows saved, 13 in the model; set model.vocab"
    ):
        other_padding.load_newest(make_state(0))
    other_padding.close()
    events = Events()
    lenient = open_manager(tmp_path, events, identity=other, allow=frozenset({"data", "model.vocab_size"}))
    assert lenient.load_newest(make_state(0)) is not None
    assert events.kinds() == ["allowed_difference", "allowed_difference"]
    lenient.close()


def test_a_setting_that_an_earlier_version_did_not_have_counts_as_its_default(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, identity={"model": {"d_model": 8}, "optimizer": {"eps": 1e-8}})
    save(manager, 1)
    manager.close()
    default = {"model": {"d_model": 8, "qk_norm": False}, "optimizer": {"eps": 1e-8, "betas": [0.9, 0.95]}}
    same = open_manager(tmp_path, identity=default)
    assert same.load_newest(make_state(0)) is not None
    same.close()
    other = open_manager(tmp_path, identity={**default, "model": {"d_model": 8, "qk_norm": True}})
    with pytest.raises(CheckpointError, match=r"another run: model.qk_norm: False in the checkpoint, True in this run"):
        other.load_newest(make_state(0))
    other.close()


def test_other_tensors_are_refused_by_name(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    save(manager, 1)
    state = make_state(0)
    state["model.extra"] = state.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"1 missing \(model.extra\), 1 unexpected \(model.norm.weight\)"):
        manager.load_newest(state)
    state = make_state(0) | {"model.embed.weight": torch.zeros(16, 8)}
    with pytest.raises(CheckpointError, match=r"12 rows saved, 16 in the model; set model.vocab_size to 12"):
        manager.load_newest(state)
    state = make_state(0) | {"model.norm.weight": torch.zeros(8, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"model.norm.weight: F32 \(8,\) saved, BF16 \(8,\) wanted"):
        manager.load_newest(state)
    manager.close()


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    events = Events()
    manager = open_manager(tmp_path, events, max_failures=2)
    save(manager, 1)
    bad = make_state(2)
    bad["model.norm.weight"][3] = float("nan")
    manager.save(SavedProgress(2, 2), bad, {})
    manager.wait()
    assert events.kinds() == ["saved", "save_failed"]
    assert "model.norm.weight has values that are not finite" in events.list[-1][1]["error"]
    manager.save(SavedProgress(3, 3), bad, {})
    with pytest.raises(
        SavingFailedError, match=r"checkpoint.max_failures \(2\) saves in a row failed, the last at step 3"
    ):
        manager.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    manager.close()


def test_a_run_keeps_the_last_the_nth_and_the_best(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, keep_last=2, keep_every=4, keep_best=1)
    for step, loss in enumerate([5.0, 1.0, 3.0, None, 4.0, 2.0, 6.0], start=1):
        save(manager, step, loss)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (2, 4, 6, 7)]
    manager.close()


def test_the_same_step_can_be_saved_again(manager: CheckpointManager, tmp_path: Path) -> None:
    save(manager, 5)
    saved = save(manager, 5)
    state = make_state(0)
    assert manager.load_newest(state) is not None
    assert_same(state, saved)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
