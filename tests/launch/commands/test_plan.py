"""The command `keepstep plan`."""

import json
import subprocess
import sys

import pytest

from launch import cli

RECIPE = "recipes/llama-70b.yaml"


def test_the_parts_of_the_plan_are_printed(capsys):
    assert cli.main(["plan", RECIPE, "--gpus", "1024", "--gpu", "h100", "--tokens", "15T", "--price", "2"]) == 0
    text = capsys.readouterr().out
    for part in ("activations", "optimizer state", "matrix products", "goodput", "1.5e+13 tokens", "cost"):
        assert part in text


def test_json_holds_bytes_and_seconds(capsys):
    assert cli.main(["plan", RECIPE, "--gpus", "1024", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    assert plan["memory_bytes"]["total"] == pytest.approx(sum(plan["memory_bytes"].values()) / 2)
    assert plan["tokens"] / plan["tokens_per_second"] / plan["goodput"] / 86_400 == pytest.approx(plan["days"])


def test_what_does_not_fit_says_by_how_much_and_what_would_help(capsys):
    overrides = ["parallel.activation_checkpointing=none", "train.micro_batch_size=4"]
    assert cli.main(["plan", RECIPE, *overrides, "--gpus", "1024"]) == 0
    text = capsys.readouterr().out
    assert "does NOT fit 80 GB" in text
    assert "parallel.activation_checkpointing=full saves" in text


def test_the_ranking_and_the_curve_are_printed(capsys):
    assert cli.main(["plan", "recipes/llama-8b.yaml", "--gpus", "64", "--search", "--top", "3"]) == 0
    assert capsys.readouterr().out.count("parallel.engine=") == 3
    assert cli.main(["plan", "recipes/llama-8b.yaml", "--gpus", "64", "--scale"]) == 0
    assert "tokens/s per GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "1024", "--gpu", "h1000"], "the nearest is h100"),
        (["--gpus", "1024", "--tokens", "banana"], "--tokens (banana) must be a positive number"),
        (["--gpus", "1024", "--tokens", "0"], "--tokens (0) must be a positive number"),
        (["--gpus", "0"], "--gpus (0) must be at least 1"),
        (["--gpus", "1023"], "the world size (1023) must be a multiple of parallel.tensor (8)"),
        (
            ["--gpus", "1024", "--gpu", "a100", "parallel.precision=fp8", "parallel.compile=true", "parallel.tensor=1"],
            "set it to bf16",
        ),
        (["--gpus", "8", "--search", "--gpu", "a100-40gb"], "no layout"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message, capsys):
    assert cli.main(["plan", RECIPE, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_plan_needs_no_torch():
    program = (
        "import sys; from launch import cli; code = cli.main(['plan', 'recipes/llama-8b.yaml', '--gpus', '64']); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
