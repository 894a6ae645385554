"""Blocks may report an auxiliary loss and metrics: every engine adds them up and differentiates them as one process."""

from typing import Any

import pytest
import torch

from tests.parallel.engine_trial import GLOBAL_BATCH, T, config_of, global_batch, train
from tests.parallel.ranks import run_ranks
from train.device_batch import IGNORE

REPORTING: dict[str, Any] = {"model": {"reporting": True}}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", **REPORTING},
    "ddp, recomputed": {"engine": "ddp", "activation_checkpointing": "full", **REPORTING},
    "fsdp2": {"engine": "fsdp2", **REPORTING},
    "fsdp2, recomputed": {"engine": "fsdp2", "activation_checkpointing": "selective", **REPORTING},
    "fsdp2, reduced once": {"engine": "fsdp2", "reduce_every_micro_batch": False, **REPORTING},
    "tensor": {"engine": "fsdp2", "tensor": 2, **REPORTING},
    "zero1": {"engine": "zero1", **REPORTING},
    "zero3": {"engine": "zero3", **REPORTING},
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train(config_of(engine="single"), reporting=True)


@pytest.fixture(scope="module")
def together() -> dict[str, Any]:
    return run_ranks("tests/parallel/engine_trial.py", "train_each", 2, CASES)[0]


def test_the_auxiliary_loss_is_differentiated(alone: dict[str, Any]) -> None:
    plain = train(config_of(engine="single"))
    assert alone["losses"][0] == plain["losses"][0]
    assert alone["norms"][0] > 1.1 * plain["norms"][0]
    assert plain["metrics"] == [[]] * 10


def test_metrics_are_added_up_over_blocks_and_micro_batches(alone: dict[str, Any]) -> None:
    targets = [int((global_batch(step).labels_BT != IGNORE).sum()) for step in range(10)]
    n_layers, tokens = 3, GLOBAL_BATCH * T
    assert [counted for _, counted in alone["metrics"]] == pytest.approx([n_layers * tokens / n for n in targets])
    assert alone["validation"][3] == n_layers * tokens


@pytest.mark.parametrize("name", CASES)
def test_every_engine_has_the_gradients_and_metrics_of_one_process(
    alone: dict[str, Any], together: dict[str, Any], name: str
) -> None:
    result = together[name]
    assert result["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
    assert result["norms"] == pytest.approx(alone["norms"], rel=TOLERANCE)
    assert result["validation"].tolist() == pytest.approx(alone["validation"].tolist(), rel=TOLERANCE)
    for ours, theirs in zip(result["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    for key, value in alone["after"].items():
        torch.testing.assert_close(result["after"][key], value, atol=TOLERANCE, rtol=0)
    assert result["repeated"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_a_compiled_block_reports_the_same(alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiler(function, backend="aot_eager"))
    result = train(config_of(engine="single", compile=True), steps=3, reporting=True)
    assert result["losses"] == pytest.approx(alone["losses"][:3], rel=TOLERANCE)
    assert result["norms"] == pytest.approx(alone["norms"][:3], rel=TOLERANCE)
    for ours, theirs in zip(result["metrics"], alone["metrics"], strict=False):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
