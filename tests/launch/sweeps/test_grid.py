"""The grammar of sweeps: commas separate values, except in brackets and quotes; names show what differs."""

import pytest

from launch.sweeps.grid import combinations, read_settings
from parallel.errors import LaunchError


def test_settings_with_several_values_make_a_grid_whose_last_setting_varies_fastest() -> None:
    grid = combinations(read_settings(["optim.lr=1e-3,2e-3", "train.seed=1,2"]))
    assert [one.overrides for one in grid] == [
        [f"optim.lr={lr}", f"train.seed={seed}"] for lr in ("1e-3", "2e-3") for seed in (1, 2)
    ]
    assert [one.suffix for one in grid] == ["lr-1e-3-seed-1", "lr-1e-3-seed-2", "lr-2e-3-seed-1", "lr-2e-3-seed-2"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1,2", ["1", "2"]),
        ("a=[0.9,0.95],[0.9,0.99]", ["[0.9,0.95]", "[0.9,0.99]"]),
        ("a='x,y',z", ["'x,y'", "z"]),
        ('a="[,",[["],"]]', ['"[,"', '[["],"]]']),
        ("a={b:1,c:2},null", ["{b:1,c:2}", "null"]),
        ("a=don't,1", ["don't", "1"]),
        ("a=1", ["1"]),
        ("a=one value", ["one value"]),
    ],
)
def test_a_comma_in_brackets_or_quotes_belongs_to_the_value(text: str, values: list[str]) -> None:
    assert read_settings([text]) == {"a": values}


def test_names_are_clear_and_are_names_of_runs() -> None:
    def suffixes(*texts: str) -> list[str]:
        return [one.suffix for one in combinations(read_settings(texts))]

    assert suffixes("optim.betas=[0.9,0.95],[0.9,0.99]") == ["betas-0.9-0.95", "betas-0.9-0.99"]
    assert suffixes("optim.lr=1e+3,1e-3") == ["lr-1e3", "lr-1e-3"]
    assert suffixes("data.sources.0.path=a/b,a-b") == ["path-1", "path-2"], "the values would read alike"
    assert suffixes("train.seed=-1,1") == ["seed-1", "seed-2"]
    assert suffixes("model.a.x=1,2", "model.b.x=3,4")[0] == "model.a.x-1-model.b.x-3"
    assert suffixes(f"a={'x' * 50},y") == ["a-1", "a-2"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["optim.lr"], "optim.lr must read SECTION.KEY=A,B,C without spaces, such as optim.lr=1e-3,2e-3"),
        (["=1,2"], "=1,2 must read SECTION.KEY=A,B,C"),
        (["a=1, 2"], "a=1, 2 must read"),
        (["a=1,2", "a=3"], "two settings name a; give all its values in one: a=A,B,C"),
        (["a=1,2,1"], "a=1,2,1 gives the value 1 twice; give each value once"),
        (["a=[1,2"], r"a=\[1,2 has no \] that ends its last value"),
        (["a='1,2"], "a='1,2 has no ' that ends its last value"),
        (["name=x,y"], "name cannot be swept: each run is named by the settings that differ"),
    ],
)
def test_what_does_not_read_so_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_settings(texts)


def test_what_slurm_splits_at_spaces_has_none() -> None:
    with pytest.raises(LaunchError, match="--sweep a=one value must read SECTION"):
        read_settings(["a=one value"], "--sweep")


def test_too_many_combinations_are_refused() -> None:
    with pytest.raises(LaunchError, match="the sweep has 1000000 combinations, and at most 10000 are allowed"):
        combinations({key: [str(n) for n in range(100)] for key in ("a", "b", "c")})
