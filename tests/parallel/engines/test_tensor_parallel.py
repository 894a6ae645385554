"""Compiled blocks that are split over two ranks have the gradients of blocks that are not compiled."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from parallel.analysis.fake_world import fake_group
from parallel.build_engine import build_engine
from parallel.engines.tensor_parallel import wait_for_output
from parallel.sharded import whole_of
from tests.parallel.engine_trial import LOSS, config_of, micro_batches, runtime_of, trainable
from tests.parallel.ranks import run_ranks

FORMS: dict[str, dict[str, Any]] = {
    "llama": {"tied_embeddings": False, "qk_norm": True},
    "gpt2": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True},
    "dropout": {"dropout": 0.2},
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_torch_drops_the_gradient_of_a_compiled_function_by_a_collective_that_still_runs() -> None:
    """The reason for `wait_for_output`. If torch has fixed this, the hook can be removed."""

    def twice(x: Tensor) -> Tensor:
        return 2 * x

    with fake_group(world_size=2, rank=0):
        mesh = init_device_mesh("cpu", (2,))
        weight = torch.ones(4, requires_grad=True)
        summed = DTensor.from_local(weight * 3, mesh, [Partial()])
        running = summed.redistribute(mesh, [Shard(0)], async_op=True).to_local()
        assert isinstance(running, AsyncCollectiveTensor)
        compiled = torch.compile(twice, backend="aot_eager")
        assert twice(running).requires_grad
        assert not compiled(running).requires_grad
        arrived = wait_for_output(torch.nn.Identity(), (), running)
        compiled(arrived).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [6.0] * 4


def gradients(model: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The whole gradients of one micro batch, by parameter, without and with compiled blocks. Collective."""
    torch.compile = partial(torch.compile, backend="aot_eager")  # the compiler's autograd; generates no code
    found = {}
    for way in ("eager", "compiled"):
        config = config_of(engine="fsdp2", tensor=2, compile=way == "compiled")
        runtime = runtime_of(config)
        engine = build_engine(config, runtime, trainable(n_layers=2, **model))
        torch.manual_seed(0)
        engine.forward_backward(micro_batches(0, runtime, number=1)[0], LOSS, 1.0)
        parameters = engine.model.named_parameters()  # pyright: ignore[reportAttributeAccessIssue]
        found[way] = {name: whole_of(p.grad).clone() for name, p in parameters}
    return found


@pytest.mark.parametrize("form", FORMS)
def test_compiled_blocks_have_the_gradients_of_blocks_that_are_not_compiled(form: str) -> None:
    for rank in run_ranks(__file__, "gradients", 2, FORMS[form]):
        assert rank["eager"].keys() == rank["compiled"].keys()
        for name, gradient in rank["eager"].items():
            assert gradient.any(), name
            torch.testing.assert_close(rank["compiled"][name], gradient, rtol=1e-5, atol=1e-6)
