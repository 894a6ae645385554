"""The live view in the terminal, and the promise that looking at a run changes nothing in its folder."""

import contextlib
import json
import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest
import xxhash

from launch import cli

ROOT = Path(__file__).parents[4]


def write(folder: Path, name: str, *records: dict) -> None:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that trains, of which rank 2 is slow."""
    folder = tmp_path / "run"
    folder.mkdir()
    now = time.time()
    (folder / "recipe.yaml").write_text("train:\n  steps: 100\n")
    steps = [
        {
            "time": now - 10 + n,
            "step": n,
            "loss": 9.0 - n,
            "lr": 1e-3,
            "grad_norm": 2.0,
            "memory_gib": 1.5,
            "attempt": 1,
        }
        for n in range(1, 8)
    ]
    write(folder, "metrics.jsonl", *steps)
    started = {"time": now - 10, "uptime": 1.0, "kind": "started", "attempt": 1, "world_size": 4}
    saved = {"time": now, "uptime": 9.0, "kind": "saved", "step": 5, "note": "[bold]\x1b[2J"}
    write(folder, "events.jsonl", started, saved)
    ranks = [
        {"rank": n, "host": "n1", "phase": "update", "step": 7, "probe_seconds": 0.001 * (1 + (n == 2))}
        for n in range(4)
    ]
    (folder / "status.json").write_text(json.dumps({"idle_seconds": 3.2, "slow": [2], "ranks": ranks}))
    return folder


def test_one_frame_shows_the_run_its_ranks_and_its_events(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(run), "--once"]) == 0
    text = capsys.readouterr().out
    assert "7 of 100 steps, 1 steps/s, 1 min 33 s left" in text
    assert "loss 2.0000  lr 1.00e-03  grad norm 2.000  GiB 1.50" in text
    assert "loss, step 1 to 7" in text
    assert "0  uuUu" in text
    assert "[bold]\ufffd[2J" in text, "what a run says is neither markup nor obeyed by the terminal"
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) == 100


def test_several_runs_are_below_each_other(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/recipe.yaml").write_text("name: new\n")
    assert cli.main(["watch", str(run), str(tmp_path / "new"), "--once", "--metric", "grad_norm"]) == 0
    text = capsys.readouterr().out
    assert text.index("grad_norm, step 1 to 7") < text.index("new") < text.index("no step is finished yet")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN"], "the output is not a terminal; `keepstep status RUN` prints the state once"),
        (["RUN", "--once", "--metric", "los"], "--metric (los) is in no record of RUN; choose one of grad_norm, loss"),
        (["RUN/logs", "--once"], "RUN/logs is not a run folder"),
        (["RUN", "--every", "0"], "--every (0) must be a number from 0.2 to 3600"),
    ],
)
def test_what_cannot_be_watched_is_said_in_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["watch", *(one.replace("RUN", str(run)) for one in arguments)]) == 2
    error = capsys.readouterr().err
    assert message.replace("RUN", str(run)) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_key_ends_the_view_and_leaves_the_terminal_as_it_was(run: Path, key: bytes) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        os.execv(sys.executable, [sys.executable, "-m", "launch.cli", "watch", str(run)])
    shown, sent, deadline = b"", False, time.monotonic() + 600
    with contextlib.suppress(OSError):  # the terminal's end
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 65_536)
            if b"q or Ctrl-C ends" in shown and not sent:
                os.write(terminal, key)
                sent = True
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode(errors="replace")
    assert b"Traceback" not in shown
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1, "the screen is given back"
    os.close(terminal)


def state_of(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mtime_ns,
            xxhash.xxh3_64_hexdigest(path.read_bytes()) if path.is_file() else "",
        )
        for path in [folder, *folder.rglob("*")]
    }


def test_looking_at_a_run_changes_nothing_in_its_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "logs/n1").mkdir(parents=True)
    with (run / "events.jsonl").open("a") as torn:
        torn.write('{"time": 1e9, "kind": "to')
    before = state_of(run)
    for command in (
        ["status", str(run)],
        ["status", str(run), str(tmp_path), "--json"],
        ["watch", str(run), "--once"],
        ["report", str(run), "--out", str(tmp_path / "out.html")],
        ["report", str(run), "--text"],
        ["report", str(run), "--json"],
    ):
        assert cli.main(command) == 0
        assert state_of(run) == before, command
