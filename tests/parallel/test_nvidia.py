"""NUMA binding and NCCL's choice of a network, from texts as the kernel and NCCL write them."""

import os
from pathlib import Path

import pytest

from parallel.environ import World, expand_cpus
from parallel.nvidia import near_cpus, record_nccl, socket_warning, warn_of_sockets

TWO_NODES = World(8, 16, 0, 8, "10.0.0.1", 29500, "torchrun")
OVER_TCP = """
n1:77:77 [0] NCCL INFO NCCL version 2.27.5+cuda13.0
n1:77:99 [0] NCCL INFO NET/IB : No device found.
n1:77:99 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0>
n1:77:99 [0] NCCL INFO Initialized NET plugin Socket
n1:77:99 [0] NCCL INFO Assigned NET plugin Socket to comm
"""
OVER_RDMA = """
n1:77:99 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0>
n1:77:99 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.2<0>
n1:77:99 [0] NCCL INFO Using network IB
"""


def test_tcp_between_nodes_is_named_with_its_interface_and_cause() -> None:
    warning = socket_warning(OVER_TCP)
    assert warning.startswith("NCCL uses TCP between the nodes (over eth0; NCCL says: NET/IB : No device found.), ")
    assert "libibverbs" in warning
    older = OVER_TCP.replace("Assigned NET plugin Socket to comm", "Using network Socket")
    assert socket_warning(older) == warning


def test_rdma_and_silence_give_no_warning() -> None:
    assert socket_warning(OVER_RDMA) == ""
    assert socket_warning("") == ""


def test_one_rank_of_a_node_warns_and_the_file_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for local_rank in (0, 1):
        file = tmp_path / "nccl.log"
        file.write_text(OVER_TCP)
        warn_of_sockets(file, World(8 + local_rank, 16, local_rank, 8, "10.0.0.1", 29500, "torchrun"))
        assert not file.exists()
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "WARNING"
    warn_of_sockets(tmp_path / "absent", TWO_NODES)
    warn_of_sockets(None, TWO_NODES)


def test_nccl_is_recorded_only_between_nodes_and_not_against_the_user() -> None:
    env: dict[str, str] = {}
    assert record_nccl(World(0, 8, 0, 8, "127.0.0.1", 1, "torchrun"), env) is None
    assert record_nccl(TWO_NODES, {"NCCL_DEBUG": "WARN"}) is None
    assert env == {}
    file = record_nccl(TWO_NODES, env)
    assert env == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(file)}
    assert str(os.getpid()) in str(file)


def test_cpus_near_a_gpu_are_those_that_the_process_may_use(tmp_path: Path) -> None:
    (tmp_path / "0000:18:00.0").mkdir()
    (tmp_path / "0000:18:00.0" / "local_cpulist").write_text("0-3,64-67\n")
    assert near_cpus("0000:18:00.0", set(range(128)), tmp_path) == {0, 1, 2, 3, 64, 65, 66, 67}
    assert near_cpus("0000:18:00.0", {2, 3, 4}, tmp_path) == {2, 3}
    assert near_cpus("0000:18:00.0", {9}, tmp_path) == set(), "bound elsewhere by the launcher"
    assert near_cpus("0000:99:00.0", {1}, tmp_path) == set()


def test_the_kernels_lists_are_expanded() -> None:
    assert expand_cpus("0-2,8\n") == {0, 1, 2, 8}
    assert expand_cpus("") == set()
    with pytest.raises(ValueError, match="invalid literal"):
        expand_cpus("a-b")
