"""The order of FSDP2's gathers, observed on one of two ranks of a fake process group."""

from functools import partial

import torch

from parallel.analysis.fake_world import fake_group
from parallel.analysis.traffic import TrafficCounter
from parallel.bootstrap import Runtime
from parallel.engines.fsdp2 import build_fsdp2
from parallel.environ import World
from parallel.layout import resolve_layout
from parallel.mesh import build_mesh, data_parallel_group
from tests.parallel.engine_trial import LOSS, config_of, micro_batches, trainable

LAYERS = 4


def test_each_block_computes_after_the_gather_of_the_next_one_in_both_directions() -> None:
    gathered: dict[str, list[int]] = {"forward": [], "backward": []}
    config = config_of(engine="fsdp2")
    layout = resolve_layout(config, 2)
    with fake_group(world_size=2, rank=0), TrafficCounter() as traffic:
        mesh = build_mesh(layout, "cpu")
        world = World(0, 2, 0, 1, "", 0, "fake")
        runtime = Runtime(world, layout, torch.device("cpu"), mesh, data_parallel_group(mesh))
        engine = build_fsdp2(config, runtime, trainable(n_layers=LAYERS))

        def record(direction: str, *_: object) -> None:
            gathered[direction].append(traffic.calls["all_gather"])

        blocks = list(engine.model.get_submodule("layers").children())
        for block in blocks:
            block.get_submodule("attention_norm").register_forward_pre_hook(partial(record, "forward"))
            block.get_submodule("mlp.down").register_full_backward_pre_hook(partial(record, "backward"))
        engine.forward_backward(micro_batches(0, runtime, number=1)[0], LOSS, 1.0)

    gathers_of_a_forward_pass = LAYERS + 1  # the first is that of the outer unit
    assert gathered["forward"] == [1 + number for number in (2, 3, 4, 4)]
    assert gathered["backward"] == [gathers_of_a_forward_pass + number for number in (2, 3, 4, 4)]
