"""What the compiler joins in the blocks of a model that is split over two ranks, found without a device."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import fx

from parallel.analysis.fake_world import fake_group
from parallel.bootstrap import start
from parallel.engines.fsdp2 import build_fsdp2
from parallel.environ import World
from parallel.errors import LaunchError
from tests.parallel.engine_trial import LOSS, config_of, fake_runtime, micro_batches, trainable

BLOCKS = 2
SETTINGS: dict[str, Any] = {"engine": "fsdp2", "tensor": 2, "compile": True}
LOOKED_AT = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch's compiler


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Counter[str]]]]:
    """The exchanges of each compiled graph, forward and backward, after inductor's pass for them."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    found: dict[str, list[Counter[str]]] = {"forward": [], "backward": []}

    def counting(kind: str, module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        looked_at = copy.deepcopy(module)
        view_to_reshape(looked_at)  # the order of inductor's passes
        looked_at.graph.eliminate_dead_code()
        if torch._inductor.config._micro_pipeline_tp:
            micro_pipeline_tp_pass(looked_at.graph)
        names = [str(node.target) for node in looked_at.graph.nodes]
        exchanges = [name for name in names if name.startswith(("symm_mem", "_c10d")) and "wait" not in name]
        found[kind].append(Counter(exchanges))
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=partial(counting, "forward"),
        bw_compiler=partial(counting, "backward"),
        decompositions=select_decomp_table(),
    )
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)  # without it the pass changes nothing
    torch.compiler.reset()
    with torch._inductor.config.patch(_micro_pipeline_tp=False):
        yield found
    torch.compiler.reset()


def train(**settings: Any) -> None:
    """One forward and backward pass as rank 0 of two."""
    with fake_group(world_size=2, rank=0):
        config = config_of(**SETTINGS, **settings)
        runtime = fake_runtime(config)
        engine = build_fsdp2(config, runtime, trainable(n_layers=BLOCKS))
        engine.forward_backward(micro_batches(0, runtime, number=1)[0], LOSS, 1.0)


@LOOKED_AT
def test_blocks_join_their_exchanges_with_products(graphs: dict[str, list[Counter[str]]]) -> None:
    train(async_tensor=True)
    joined = {"symm_mem.fused_all_gather_matmul.default": 2, "symm_mem.fused_matmul_reduce_scatter.default": 2}
    backward = {"symm_mem.fused_all_gather_matmul.default": 2, "_c10d_functional.reduce_scatter_tensor.default": 2}
    assert graphs == {"forward": [joined] * BLOCKS, "backward": [backward] * BLOCKS}


@LOOKED_AT
def test_without_the_setting_exchanges_stay_as_they_are(graphs: dict[str, list[Counter[str]]]) -> None:
    train()
    plain = {
        "_c10d_functional.all_gather_into_tensor.default": 2,
        "_c10d_functional.reduce_scatter_tensor.default": 2,
    }
    assert graphs == {"forward": [plain] * BLOCKS, "backward": [plain] * BLOCKS}


def test_a_rank_on_a_cpu_is_refused_at_start_up() -> None:
    with pytest.raises(LaunchError, match=r"parallel.async_tensor \(true\) needs a CUDA device, but this rank has cpu"):
        start(config_of(**SETTINGS, async_tensor=True), World(0, 2, 0, 2, "127.0.0.1", 0, "env"))


def test_peers_on_two_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.bootstrap.choose_device", lambda *_, **__: torch.device("cuda", 0))
    with pytest.raises(LaunchError, match=r"needs all ranks .* one node, but parallel.tensor is 2 and a node has 1 r"):
        start(config_of(**SETTINGS, async_tensor=True), World(0, 2, 0, 1, "there", 0, "env"))
