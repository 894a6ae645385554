"""When gradients are ready under DDP, observed on one of two ranks of a fake process group."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parallel.analysis.fake_world import fake_group
from parallel.engines.ddp import build_ddp
from tests.parallel.engine_trial import LOSS, config_of, fake_runtime, micro_batches, trainable

LAYERS = 4


def exchanged(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Completes immediately: the fake process group has no result for DDP."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def order_of_events(precision: str, **model: Any) -> list[tuple[str, str]]:
    """The order of events in a backward pass: ("ready", PARAMETER), and ("backward", BLOCK) when a block's begins."""
    events: list[tuple[str, str]] = []
    config = config_of(engine="ddp", precision=precision)
    with fake_group(world_size=2, rank=0):
        runtime = fake_runtime(config)
        engine = build_ddp(config, runtime, trainable(n_layers=LAYERS, **model))
        assert isinstance(engine._called, DistributedDataParallel)
        engine._called.register_comm_hook(None, exchanged)
        for name, parameter in engine.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(("ready", name)))
        for name, block in engine.model.get_submodule("layers").named_children():
            block.get_submodule("mlp.down").register_full_backward_pre_hook(
                lambda *_, name=name: events.append(("backward", name))
            )
        engine.forward_backward(micro_batches(0, runtime, number=1)[0], LOSS, 1.0)
    return events


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_gradients_of_a_block_are_ready_before_the_backward_of_the_block_before_it(precision: str) -> None:
    events = order_of_events(precision, tied_embeddings=False)
    ready = [name for kind, name in events if kind == "ready"]
    assert len(ready) == len(set(ready)) == 1 + 2 + LAYERS * 9  # embedding; last norm and head; blocks
    for block in range(LAYERS):
        before_its_backward = events[: events.index(("backward", str(block)))]
        finished = [name for name in ready if name.startswith(("norm.", "head."))]
        finished += [
            name for later in range(block + 1, LAYERS) for name in ready if name.startswith(f"layers.{later}.")
        ]
        assert {name for kind, name in before_its_backward if kind == "ready"} == set(finished)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_a_tied_embedding_waits_for_the_end_of_the_backward_pass(precision: str) -> None:
    assert order_of_events(precision, tied_embeddings=True)[-1] == ("ready", "embed.weight")
