"""The exit code of a group of ranks, and what a node says when the rendezvous fails."""

import socket
import subprocess
import sys

import pytest

from launch.supervise.agent import HEAD_LOST, NODES_MISSING, group_exit_code
from launch.supervise.supervisor import _explained  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([], 0),
        ([0, 0], 0),
        ([75, 75], 75),
        ([75, 1], 75),
        ([-9, 1], 1),
        ([1, 2], 2),
        ([2, 75], 2),
        ([-15, 0], 1),
        ([1, 3, -15], 3),
    ],
)
def test_for_good_outweighs_stopped_outweighs_failed(codes, code):
    assert group_exit_code(codes) == code


class FakePeers:
    """What heartbeats told this node."""

    def __init__(self, head_code: int | None = None, missing: list[str] | None = None) -> None:
        self._head_code, self._missing = head_code, missing or []

    def head_code(self, wait_seconds: float) -> int | None:
        return self._head_code

    def missing(self, env: dict[str, str]) -> list[str]:
        return self._missing


@pytest.mark.parametrize(
    ("code", "peers", "node_code", "printed"),
    [
        (HEAD_LOST, FakePeers(head_code=2), 2, ""),  # node 0 has printed the reason
        (HEAD_LOST, FakePeers(), 1, "keepstep: the connection to node 0 broke"),
        (HEAD_LOST, None, 1, "keepstep: the connection to node 0 broke"),
        (NODES_MISSING, FakePeers(missing=["node 1 (b)"]), 1, "keepstep: no heartbeat from node 1 (b)\n"),
        (NODES_MISSING, None, 1, ""),
        (75, FakePeers(head_code=2), 75, ""),
    ],
)
def test_a_lost_rendezvous_is_explained_once(code, peers, node_code, printed, capsys):
    assert _explained(code, peers) == node_code
    shown = capsys.readouterr().err
    assert shown.startswith(printed)
    assert bool(shown) is bool(printed)


MISSING = """
import sys
from launch.supervise import network
from launch.supervise.agent import main
network.JOIN_SECONDS = 3
logs = sys.argv[1]
head = f"--rdzv-endpoint=127.0.0.1:{sys.argv[2]}"
sys.exit(main(["--nnodes=3", "--nproc-per-node=1", "--rdzv-backend=keepstep", head, "--rdzv-id=x",
    "--rdzv-conf=is_host=true,join_timeout=3", f"--log-dir={logs}", "--no-python", "true"]))
"""


def test_a_node_that_never_comes_is_counted_in_one_line(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-c", MISSING, str(tmp_path), str(port)]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == NODES_MISSING, result.stderr
    lines = [line for line in result.stderr.splitlines() if "Warning" not in line and not line.startswith("[W")]
    assert [line.startswith("keepstep: 1 of 3 nodes came to the rendezvous at 127.0.0.1:") for line in lines] == [True]
