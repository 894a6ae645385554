"""The bench's arithmetic: ratios within rounds, and a table that holds them."""

import sys

import pytest

from bench.step import LIMIT, Contender, contenders, table

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
    return Contender(name, "program.py", False, sys.executable, rounds=list(rounds), processor=list(rounds))


def test_ratios_are_taken_within_a_round_so_that_a_slow_round_hits_all_alike() -> None:
    lines = table([timed(LIMIT, 1, 9, 2), timed("keepstep single", 2, 18, 4), timed("nanogpt", 3, 27, 6)], SETTINGS, 1)
    assert "50%" in lines[3]
    assert "1.50 (1.50 to 1.50)" in lines[3]
    assert "16 (4 to 32)" in lines[3]  # 64 tokens in 4 (18 to 2) seconds


def test_a_contender_that_failed_is_named() -> None:
    lines = table([timed("keepstep single", 2), timed("litgpt")], SETTINGS, 1)
    assert len(lines) == 4
    assert lines[-1].strip() == "Did not run: litgpt."


@pytest.mark.parametrize(("ranks", "engines"), [(1, {"single"}), (2, {"ddp", "fsdp2"})])
def test_engines_fit_the_number_of_ranks(ranks: int, engines: set[str]) -> None:
    ours = [one for one in contenders("python", [], ranks) if one.name.startswith("keepstep")]
    assert {one.options["engine"] for one in ours} == engines
