import os
import random
import subprocess
import sys
from typing import Any

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


def test_data_parallel_ranks_draw_differently_and_tensor_parallel_peers_equally() -> None:
    layout = Layout(replicate=2, shard=2, tensor=2)
    by_rank = [draws(rank, layout) for rank in range(8)]
    assert by_rank[0::2] == by_rank[1::2]
    assert len({value for triple in by_rank[0::2] for value in triple}) == 12


def test_each_step_draws_other_numbers_and_a_repeated_step_the_same() -> None:
    layout = Layout(1, 1, 1)
    assert draws(0, layout, step=3) == draws(0, layout, step=3) != draws(0, layout, step=4)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Debian machine: its own name `here` resolves to loopback, and the network knows the node `there`."""
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
        (World(0, 2, 0, 2, "here", 29500, "env"), {}, "lo"),
        (World(1, 2, 0, 1, "127.0.0.1", 29500, "env"), {}, "lo"),
        (World(1, 2, 0, 1, "localhost", 29500, "env"), {}, None),
    ],
)
def test_ranks_on_several_nodes_use_the_interface_that_leads_to_the_others(
    world: World, env: dict[str, str], bound: str | None
) -> None:
    bootstrap.bind_interfaces(world, env)
    assert env.get("GLOO_SOCKET_IFNAME") == bound


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("world", "found"),
    [
        (World(0, 2, 0, 2, "here", 29500, "slurm"), ("127.0.0.1", True)),
        (World(1, 2, 0, 1, "::1", 29500, "env"), ("::1", True)),
        (World(0, 4, 0, 2, "here", 29500, "slurm"), ("10.0.0.8", True)),
        (World(1, 4, 1, 2, "localhost", 29500, "env"), ("10.0.0.8", True)),
        (World(2, 4, 0, 2, "there", 29500, "slurm"), ("there", False)),
    ],
)
def test_rank_0_listens_on_loopback_or_at_the_address_that_other_nodes_use(
    world: World, found: tuple[str, bool]
) -> None:
    assert addresses.meeting_point(world) == found


@pytest.mark.usefixtures("machine")
def test_a_head_node_whose_name_fits_none_of_its_addresses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "own_addresses", lambda: {"10.0.0.8": "eth0", "10.1.0.8": "ib0"})
    with pytest.raises(
        LaunchError, match=r"the head node here resolves to 127\.0\.1\.1 .* use one of its own addresses: 10"
    ):
        bootstrap.bind_interfaces(World(0, 4, 0, 2, "here", 29500, "slurm"), {})


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("GLOO_SOCKET_IFNAME", "eth0,lo"),
        ("NCCL_SOCKET_IFNAME", "=lo"),
    ],
)
def test_loopback_is_refused_for_ranks_on_several_machines(name: str, value: str) -> None:
    with pytest.raises(
        LaunchError, match=rf"{name} \({value}\) names the loopback interface, but the 4 ranks .*; unset it, or set it"
    ):
        bootstrap.bind_interfaces(World(2, 4, 0, 2, "there", 29500, "slurm"), {name: value})


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("value", ["^lo", "lowpan0"])
def test_an_interface_that_is_not_loopback_is_accepted(value: str) -> None:
    env = {"NCCL_SOCKET_IFNAME": value}
    bootstrap.bind_interfaces(World(2, 4, 0, 2, "there", 29500, "slurm"), env)
    assert env == {"NCCL_SOCKET_IFNAME": value, "GLOO_SOCKET_IFNAME": "eth0"}


def join_that_raises(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Join a process group of two ranks, in which gloo raises an error."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(bootstrap, "_store", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    bootstrap._join(World(1, 2, 0, 1, "there", 29500, "slurm"), torch.device("cpu"), 5.0)


def test_ranks_whose_addresses_do_not_reach_each_other_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo raises a plain RuntimeError here, with a stack of C++ frames."""
    message = (
        "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error\nframe"
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    with pytest.raises(LaunchError) as found:
        join_that_raises(monkeypatch, RuntimeError(message))
    assert "\n" not in str(found.value)
    assert "rank 1 of 2 could not connect to the other ranks at there:29500: Gloo connectFullMesh" in str(found.value)
    assert str(found.value).endswith("check that GLOO_SOCKET_IFNAME (eth1) connects the machines, without a firewall")


def test_any_other_error_of_torch_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"^trying to initialize .* twice!$"):
        join_that_raises(monkeypatch, RuntimeError("trying to initialize the default process group twice!"))


def test_single_needs_no_process_group() -> None:
    world = World(0, 1, 0, 1, "127.0.0.1", 0, "single")
    runtime = start(ParallelConfig(engine="single", device="cpu"), world)
    assert runtime.mesh is None
    assert (runtime.data_parallel_rank, runtime.data_parallel_size) == (0, 1)
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_an_absent_device_is_reported() -> None:
    with pytest.raises(
        LaunchError, match=r"parallel.device is cuda, but this machine has no accelerator .*auto or cpu"
    ):
        choose_device("cuda", 0)


@pytest.mark.parametrize(
    ("launcher", "env", "local_rank", "device"),
    [
        ("slurm", {"CUDA_VISIBLE_DEVICES": "3"}, 3, 0),
        ("mpi", {"ROCR_VISIBLE_DEVICES": "1"}, 1, 0),
        ("env", {"CUDA_VISIBLE_DEVICES": "GPU-1f"}, 2, 0),
        ("slurm", {}, 1, None),
        ("torchrun", {"CUDA_VISIBLE_DEVICES": "3"}, 1, None),
        ("deepspeed", {"CUDA_VISIBLE_DEVICES": "3"}, 1, None),
        ("torchrun", {"CUDA_VISIBLE_DEVICES": "3"}, 0, 0),
    ],
)
def test_a_rank_that_sees_one_device_of_its_own_takes_it(
    monkeypatch: pytest.MonkeyPatch, launcher: str, env: dict[str, str], local_rank: int, device: int | None
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    world = World(local_rank, 4, local_rank, 4, "h", 1, launcher)
    own = bootstrap.sees_own_device(world, env)
    if device is None:
        with pytest.raises(LaunchError, match=f"local rank {local_rank} has no cuda device: this node has 1"):
            choose_device("auto", local_rank, own)
    else:
        assert choose_device("auto", local_rank, own) == torch.device("cuda", device)


def test_zero_gets_the_local_rank_that_srun_does_not_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.setattr(bootstrap, "_join", lambda *_: None)
    monkeypatch.setattr(bootstrap, "build_mesh", lambda *_: None)
    monkeypatch.setattr(bootstrap, "data_parallel_group", lambda _: None)
    start(ParallelConfig(engine="zero1", device="cpu"), World(1, 2, 1, 2, "127.0.0.1", 29500, "slurm"))
    assert os.environ["LOCAL_RANK"] == "1"


@pytest.mark.parametrize("settings", [{"engine": "fsdp2", "tensor": 2, "algorithm": "muon"}, {"engine": "zero2"}])
def test_every_group_of_a_rank_has_the_time_limit_of_the_recipe(settings: dict[str, Any]) -> None:
    """torch gives half an hour to the groups of a mesh, to those that Muon makes, and to DeepSpeed's."""
    ranks = run_ranks("tests/parallel/timeout_ranks.py", "timeouts", 4, settings | {"timeout_seconds": 123.0})
    for found in ranks:
        assert len(found) > 1, "the groups of the mesh are among them"
        assert {seconds for each in found.values() for seconds in each} == {123.0}, found


def test_ranks_that_cannot_connect_report_the_address_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    world = World(1, 2, 1, 2, "127.0.0.1", 1, "env")
    with pytest.raises(
        LaunchError, match=r"rank 1 of 2 could not connect to the other ranks at 127.0.0.1:1: .*port is free.*firewall$"
    ):
        start(ParallelConfig(engine="ddp", device="cpu", timeout_seconds=1.0), world)
    assert "frame #" not in capfd.readouterr().err


@pytest.mark.parametrize("function", ["leave", "leave_at_once"])
def test_leaving_flushes_and_keeps_the_exit_code(function: str) -> None:
    program = f"from parallel.bootstrap import {function}; print('printed', end=''); {function}(75)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (75, "printed")


def test_a_rank_that_raises_is_shown_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2 exited with 1:\n(.|\n)*ValueError: on purpose"):
        run_ranks("tests/parallel/engine_trial.py", "fail_on_rank_1", 2)
