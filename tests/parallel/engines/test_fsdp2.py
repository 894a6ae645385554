"""The order of FSDP2's gathers and reductions, observed on one of two ranks of a fake process group."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from parallel.analysis.fake_world import fake_group
from parallel.analysis.traffic import TrafficCounter
from parallel.engines.fsdp2 import build_fsdp2
from parallel.engines.torch_engine import TorchEngine
from tests.parallel.engine_trial import LOSS, config_of, fake_runtime, micro_batches, train, trainable
from tests.parallel.ranks import run_ranks

LAYERS = 4


class Observed:
    """The traffic before each part of the model computes, in one forward and backward pass."""

    def __init__(self, *, tied: bool) -> None:
        self.forward: dict[str, int] = {}
        """Gathers requested before the forward of a part."""
        self.backward: dict[str, tuple[int, int]] = {}
        """Gathers requested, and reductions, before the backward of a block."""
        config = config_of(engine="fsdp2")
        with fake_group(world_size=2, rank=0), TrafficCounter() as traffic:
            runtime = fake_runtime(config)
            engine = build_fsdp2(config, runtime, trainable(n_layers=LAYERS, tied_embeddings=tied))
            for name, module in first_modules(engine):
                module.register_forward_pre_hook(
                    lambda *_, name=name: self.forward.update({name: traffic.calls["all_gather"]})
                )
            for name, block in engine.model.get_submodule("layers").named_children():
                block.get_submodule("mlp.down").register_full_backward_pre_hook(
                    lambda *_, name=name: self.backward.update(
                        {name: (traffic.calls["all_gather"], traffic.calls["reduce_scatter"])}
                    )
                )
            engine.forward_backward(micro_batches(0, runtime, number=1)[0], LOSS, 1.0)
        self.all = (traffic.calls["all_gather"], traffic.calls["reduce_scatter"])


def first_modules(engine: TorchEngine) -> Iterator[tuple[str, nn.Module]]:
    """Each part's name and the module that computes first in it."""
    yield "embed", engine.model.get_submodule("embed")
    for name, block in engine.model.get_submodule("layers").named_children():
        yield name, block.get_submodule("attention_norm")
    yield "head", engine.model.get_submodule("norm")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def observed(request: pytest.FixtureRequest) -> tuple[Observed, bool]:
    return Observed(tied=request.param), request.param


def test_each_part_computes_after_the_gather_of_the_next_one(observed: tuple[Observed, bool]) -> None:
    found, is_tied = observed
    blocks = [str(block) for block in range(LAYERS)]
    units = ["embed", *blocks] if is_tied else ["embed", *blocks, "head"]  # tied: `embed` stands for the outer unit
    for index, unit in enumerate(units):
        assert found.forward[unit] == min(index + 2, len(units))
    gathers_of_a_forward_pass = len(units)
    assert [found.backward[block][0] for block in reversed(blocks)] == [
        gathers_of_a_forward_pass + number for number in (2, 3, 4, 4)
    ]
    assert found.all[0] == gathers_of_a_forward_pass + LAYERS  # nothing but blocks is gathered twice


def test_each_unit_is_reduced_before_the_backward_of_the_unit_before_it(observed: tuple[Observed, bool]) -> None:
    found, is_tied = observed
    ahead = 0 if is_tied else 1  # that of the head
    reduced = [found.backward[str(block)][1] for block in reversed(range(LAYERS))]
    assert reduced == [ahead + number for number in range(LAYERS)]
    assert found.all[1] == LAYERS + 1 + ahead


def test_separate_units_train_the_model_that_one_process_trains() -> None:
    shared: dict[str, Any] = {"tied_embeddings": False, "positions": "learned"}
    cases = {
        name: {"engine": "fsdp2", "reduce_every_micro_batch": name == "each", "model": shared}
        for name in ("each", "last")
    }
    alone = train(config_of(engine="single"), **shared)
    for rank in run_ranks("tests/parallel/engine_trial.py", "train_each", 2, cases):
        for name in cases:
            assert rank[name]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
            assert rank[name]["repeated"]
