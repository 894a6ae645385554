"""The benchmark's arithmetic: ratios within rounds, and the table of them."""

import sys
from pathlib import Path

from bench.contender import Contender
from bench.step import GLOO, LIMIT, ONE_PROCESS, contenders, measure, table

SETTINGS = {
    "vocab_size": 64,
    "seq_len": 16,
    "n_layers": 1,
    "n_heads": 1,
    "d_model": 16,
    "d_ff": 64,
    "micro_batch_size": 4,
}


def timed(name: str, *rounds: float) -> Contender:
    return Contender(name, "program.py", sys.executable, rounds=list(rounds), processor=list(rounds))


def test_ratios_are_taken_within_a_round_so_that_a_slow_round_does_not_change_them() -> None:
    lines = table(
        [timed(LIMIT, 1, 9, 2), timed("keepstep single", 2, 18, 4), timed("nanogpt", 3, 27, 6)], SETTINGS, 1e12
    )
    assert "| 0.50 |" in lines[3]
    assert "1.50 (1.50 to 1.50)" in lines[3]
    assert "16 (4 to 32)" in lines[3]  # 64 tokens in 4 (18 to 2) seconds


def test_two_processes_are_compared_by_tokens() -> None:
    two = timed("keepstep ddp", 2)
    two.processes = 2
    lines = table([timed(ONE_PROCESS, 1.0), two], SETTINGS, 1e12)
    assert "| 64 (64 to 64) |" in lines[3]
    assert "| 1.00 |" in lines[3]


def test_a_contender_that_does_not_start_in_time_is_named(tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import time; time.sleep(60)")
    slow, broken = (Contender(name, str(sleeper), sys.executable) for name in ("litgpt", "deepspeed"))
    broken.program = str(tmp_path / "nothing.py")
    entrants = [timed("keepstep single", 2), slow, broken]
    measure([slow], SETTINGS, rounds=1, steps=1, start_limit=1.0)
    measure([broken], SETTINGS, rounds=1, steps=1, start_limit=250.0)
    *_, last = table(entrants, SETTINGS, 1e12)
    assert "litgpt (no first step within 1 s)" in last
    assert "deepspeed (ended early, see " in last


def test_the_contenders_depend_on_the_number_of_ranks() -> None:
    alone, together = ({one.name: one.processes for one in contenders("python", [], ranks)} for ranks in (1, 2))
    assert set(alone.values()) == {1}
    assert {"keepstep single", "keepstep single, compiled", LIMIT} < alone.keys()
    assert together.pop(ONE_PROCESS) == 1
    assert set(together.values()) == {2}
    assert {"keepstep ddp, compiled", "keepstep fsdp2, compiled", GLOO} < together.keys()
