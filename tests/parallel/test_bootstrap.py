import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from parallel import addresses, bootstrap
from parallel.bootstrap import Runtime, choose_device, seed_rank, start
from parallel.config import ParallelConfig
from parallel.environ import World
from parallel.errors import LaunchError
from parallel.layout import Layout
from tests.parallel.ranks import ROOT, run_ranks


def rank_of(rank: int, layout: Layout) -> Runtime:
    world = World(rank, layout.world_size, rank, layout.world_size, "127.0.0.1", 0, "env")
    return Runtime(world, layout, torch.device("cpu"), None, None)


def draws(rank: int, layout: Layout, step: int = 0) -> tuple[float, float, float]:
    seed_rank(7, rank_of(rank, layout), step)
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_data_parallel_ranks_draw_differently_and_tensor_parallel_peers_alike() -> None:
    layout = Layout(replicate=2, shard=2, tensor=2)
    by_rank = [draws(rank, layout) for rank in range(8)]
    assert by_rank[0::2] == by_rank[1::2]
    assert len({value for triple in by_rank[0::2] for value in triple}) == 12


def test_each_step_draws_anew_and_the_same_again_when_repeated() -> None:
    layout = Layout(1, 1, 1)
    assert draws(0, layout, step=3) == draws(0, layout, step=3) != draws(0, layout, step=4)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's: its own name is `here` and stands for loopback; the network knows `there`."""
    names = {"here": "127.0.1.1", "there": "10.0.0.7", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(addresses, "address_of", names.__getitem__)
    monkeypatch.setattr(bootstrap, "address_of", names.__getitem__)
    monkeypatch.setattr(addresses, "own_addresses", lambda: {"10.0.0.8": "eth0"})
    monkeypatch.setattr(addresses, "address_towards", lambda host, port: "10.0.0.8")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("world", "env", "bound"),
    [
        (World(0, 4, 0, 2, "here", 29500, "slurm"), {}, "eth0"),
        (World(1, 4, 1, 2, "here", 29500, "slurm"), {}, "eth0"),
        (World(2, 4, 0, 2, "there", 29500, "slurm"), {}, "eth0"),
        (World(2, 4, 0, 2, "there", 29500, "slurm"), {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0"),
        (World(0, 2, 0, 2, "here", 29500, "env"), {}, None),
        (World(1, 2, 0, 1, "127.0.0.1", 29500, "env"), {}, None),
        (World(1, 2, 0, 1, "localhost", 29500, "env"), {}, None),
    ],
)
def test_ranks_on_several_nodes_meet_at_the_interface_that_leads_there(
    world: World, env: dict[str, str], bound: str | None
) -> None:
    bootstrap.bind_gloo(world, env)
    assert env.get("GLOO_SOCKET_IFNAME") == bound


@pytest.mark.usefixtures("machine")
def test_a_head_with_several_addresses_and_a_name_for_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "own_addresses", lambda: {"10.0.0.8": "eth0", "10.1.0.8": "ib0"})
    with pytest.raises(LaunchError, match=r"the head here is 127\.0\.1\.1 .* use one of its own addresses: 10"):
        bootstrap.bind_gloo(World(0, 4, 0, 2, "here", 29500, "slurm"), {})


def test_single_needs_no_process_group() -> None:
    world = World(0, 1, 0, 1, "127.0.0.1", 0, "single")
    runtime = start(ParallelConfig(engine="single", device="cpu"), world)
    assert runtime.mesh is None
    assert (runtime.data_parallel_rank, runtime.data_parallel_size) == (0, 1)
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_an_absent_device_is_named() -> None:
    with pytest.raises(
        LaunchError, match=r"parallel.device is cuda, but this machine has no accelerator .*auto or cpu"
    ):
        choose_device("cuda", 0)


def test_ranks_that_never_meet_say_where_they_looked() -> None:
    world = World(1, 2, 1, 2, "127.0.0.1", 1, "env")
    with pytest.raises(LaunchError, match=r"rank 1 of 2 could not meet the others at 127.0.0.1:1: .*port is free"):
        start(ParallelConfig(engine="ddp", device="cpu", timeout_seconds=1.0), world)


@pytest.mark.parametrize("how", ["leave", "leave_at_once"])
def test_leaving_flushes_and_keeps_the_exit_code(how: str) -> None:
    program = f"from parallel.bootstrap import {how}; print('said', end=''); {how}(75)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (left.returncode, left.stdout) == (75, "said")


def test_a_rank_that_raises_is_shown_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2 left with 1:\n(.|\n)*ValueError: on purpose"):
        run_ranks("tests/parallel/engine_trial.py", "fail_on_rank_1", 2)
