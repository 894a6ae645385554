"""Log files of ranks, to which later starts append."""

import io
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.supervise import agent
from launch.supervise.rank_logs import (
    LAST_LINES,
    REDIRECT,
    VARIABLE,
    Failure,
    Follower,
    RankLogs,
    last_lines,
    root_cause,
    was_aborted_for_a_peer,
)


def environments(restart: int = 0, first_rank: int = 0) -> dict[int, dict[str, str]]:
    return {
        local: {
            "RANK": str(first_rank + local),
            "WORLD_SIZE": "4",
            "GROUP_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "job7.0",
            "TORCHELASTIC_RESTART_COUNT": str(restart),
        }
        for local in range(2)
    }


def write_as_rank(env: dict[str, str], words: str) -> None:
    argv = ["sh", "-c", REDIRECT, "sh", "sh", "-c", f"echo {words}; echo {words} again >&2"]
    subprocess.run(argv, env=os.environ | env, check=True)


def test_each_start_appends_a_header_and_both_streams(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path, terminal=False)
    for restart in range(2):
        envs = environments(restart, first_rank=2)
        logs.reify(envs)
        write_as_rank(envs[1], f"start {restart}")
    logs.close()
    lines = (tmp_path / "rank-3.log").read_text().splitlines()
    assert [line.partition(" rank ")[2] for line in lines[::3]] == [
        "3 of 4, job7.0, restart 0",
        "3 of 4, job7.0, restart 1",
    ]
    assert last_lines(tmp_path / "rank-3.log") == ["start 1", "start 1 again"]


def test_the_first_rank_is_shown_once_and_with_its_number_if_there_are_several_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second launcher does not repeat what the first one showed
        logs = RankLogs(tmp_path, terminal=False)
        envs = environments()
        logs.reify(envs)
        write_as_rank(envs[0], "hello")
        write_as_rank(envs[1], "quiet")
        logs.close()
        assert capsys.readouterr().err == "[0] hello\n[0] hello again\n"


def test_on_a_terminal_the_first_rank_writes_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs = RankLogs(tmp_path, terminal=True)
    envs = environments()
    logs.reify(envs)
    write_as_rank(envs[0], "hello")
    assert capfd.readouterr() == ("hello\n", "hello again\n")
    logs.close()
    assert [file.name for file in tmp_path.glob("*")] == [".lock", "rank-1.log"]


def test_a_second_launcher_in_the_folder_neither_shows_nor_replaces_what_the_first_one_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, first_envs = RankLogs(tmp_path, terminal=False), environments()
    first.reify(first_envs)
    second, second_envs = RankLogs(tmp_path, terminal=False), environments()
    assert second.root_log_dir == str(tmp_path / f"beside-{os.getpid()}")
    second.reify(second_envs)
    first.show_all()
    write_as_rank(first_envs[0], "healthy")
    write_as_rank(second_envs[0], "refused")
    second.close()
    assert capsys.readouterr().err == "[0] refused\n[0] refused again\n"
    assert last_lines(tmp_path / "rank-0.log") == ["healthy", "healthy again"]
    first.close()
    third = RankLogs(tmp_path, terminal=False)
    assert third.root_log_dir == str(tmp_path)
    third.close()


def test_ranks_write_to_the_terminal_if_their_logs_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    envs = environments()
    RankLogs(tmp_path / "file", terminal=False).reify(envs)
    assert "keepstep: rank 0 writes here, not to" in capfd.readouterr().err
    assert [env[VARIABLE] for env in envs.values()] == ["", ""]


def test_a_follower_shows_the_rest_of_the_file_before_it_ends(tmp_path: Path) -> None:
    file, out = tmp_path / "log", io.StringIO()
    file.write_text("old\n")
    follower = Follower(file, 4, "> ", out)
    with file.open("a") as lines:
        for i in range(3):
            print(f"new {i}", file=lines, flush=True)
            time.sleep(0.05)
    follower.close()
    assert out.getvalue() == "> new 0\n> new 1\n> new 2\n"


def test_only_the_end_of_a_long_log_is_returned(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"{i}\n" for i in range(1000)))
    assert last_lines(tmp_path / "log") == [str(i) for i in range(1000 - LAST_LINES, 1000)]


def test_a_log_of_many_gigabytes_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        log.truncate(1 << 40)  # a hole, which takes no space on the disk
        log.seek(0, os.SEEK_END)
        log.write(b"\nfirst\nlast\n")
    assert last_lines(tmp_path / "log")[-2:] == ["first", "last"]


def test_the_root_cause_is_the_first_failure_that_no_other_caused(tmp_path: Path) -> None:
    ends = {
        "a": (10.0, "signal SIGTERM", (True, False, True)),
        "b": (11.0, "exit code 1", (False, True, True)),
        "c": (12.0, "signal SIGKILL", (False, False, True)),
        "d": (13.0, "exit code 1", (False, False, True)),
    }
    for host, (seconds, ending, suspicion) in ends.items():
        (tmp_path / host).mkdir()
        Failure(seconds, 0, host, ending, suspicion, "", []).save(tmp_path / host)
    (tmp_path / "e").mkdir()
    (tmp_path / "e/failure.json").write_text("{torn")
    for since, host in ((0.0, "c"), (12.5, "d"), (14.0, None)):
        cause = root_cause(tmp_path, since)
        assert (cause and cause.host) == host


WATCHDOG = """=== 2026-01-01 00:00:00 rank 1 of 2, job, restart 1
[rank1]:[E101 00:00:01.123 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog \
thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.29.7
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketPollConnect: connect to 10.0.0.1<43210> returned Connection refused, exceeded error retry count after 35 attempts
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2376 (most recent call first):
""" + "".join(f"frame #{i}: c10d::ProcessGroupNCCL::Watchdog::run() + 0x{i:x}\n" for i in range(60))
ECC = """=== 2026-01-01 00:00:00 rank 0 of 2, job, restart 1
[rank0]:[E101 00:00:01.123 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog \
thread terminated with exception: CUDA error: uncorrectable ECC error encountered
terminate called after throwing an instance of 'c10::DistBackendError'
"""


def test_an_abort_by_the_watchdog_of_nccl_points_to_another_rank(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text(WATCHDOG)
    assert was_aborted_for_a_peer(-signal.SIGABRT, log)
    assert not was_aborted_for_a_peer(1, log), "only an abort is the watchdog's"
    assert not was_aborted_for_a_peer(-signal.SIGABRT, None)
    log.write_text(WATCHDOG + ECC)
    assert not was_aborted_for_a_peer(-signal.SIGABRT, log), "the newest start has a device error of its own"
    log.write_text(
        "=== start\n[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)\n"
    )
    assert was_aborted_for_a_peer(-signal.SIGABRT, log)


@dataclass
class Ended:
    """A failed rank, as torchrun reports it."""

    local_rank: int
    exitcode: int
    timestamp: int = 100
    pid: int = 1


@pytest.mark.parametrize("cause", [Ended(1, 1), Ended(1, -signal.SIGKILL), Ended(1, 1, timestamp=101)])
def test_ranks_that_the_watchdog_of_nccl_aborted_do_not_outrank_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: Ended
) -> None:
    logs = RankLogs(tmp_path, terminal=False)
    logs.reify(environments())
    logs.files[1].write_text("=== start\nValueError: the cause\n")
    logs.files[0].write_text(WATCHDOG)
    logs.close()
    agent._report_root_cause({0: Ended(0, -signal.SIGABRT), 1: cause}, logs, 2, 0)
    assert "keepstep: rank 1 (pid 1) failed first" in capsys.readouterr().err
    saved = root_cause(tmp_path.parent, 0.0)
    assert saved is not None
    assert saved.rank == 1


def test_nodes_whose_ranks_were_all_aborted_do_not_outrank_the_node_of_the_cause(tmp_path: Path) -> None:
    for node, exit_code in (("a", -signal.SIGABRT), ("b", 1)):
        logs = RankLogs(tmp_path / node, terminal=False)
        logs.reify(environments())
        logs.files[1].write_text(WATCHDOG if node == "a" else "=== start\nkeepstep: the disk is full\n")
        logs.close()
        agent._report_root_cause({1: Ended(1, exit_code)}, logs, 2, 0)
    cause = root_cause(tmp_path, 0.0)
    assert cause is not None
    assert cause.ending == "exit code 1"
