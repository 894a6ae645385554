"""The verdict before a run: what fits is said in one line, and what cannot fit is refused."""

import json

import pytest

from launch import cli
from launch.plan.checked import verdict as verdicts
from launch.plan.checked.devices import Device
from launch.plan.checked.verdict import check_before_run, refuse_what_cannot_fit, verdict
from launch.plan.estimate import memory_of
from launch.plan.machine import find_machine
from launch.supervise.local import Node
from parallel.errors import LaunchError
from train.config_file import load_recipe
from train.health.exhausted import PLAN_VARIABLE

H100 = Device("h100", 96e9, find_machine("h100"))
RECIPE = "recipes/llama-8b.yaml"
TOO_MUCH = ["parallel.activation_checkpointing=none", "train.micro_batch_size=8", "parallel.compile=false"]


def device(gib: float) -> Device:
    return Device("test", gib * 2**30, None)


def test_the_verdict_is_one_line_with_memory_and_time():
    line = verdict(load_recipe(RECIPE), 64, H100)
    assert line.startswith("plan: ")
    assert "of 74.5 GiB on each of 64 x h100, fits with" in line
    assert line.endswith(" days")
    assert "\n" not in line


def test_a_run_is_refused_only_far_above_the_memory():
    recipe = load_recipe(RECIPE)
    needed = memory_of(recipe, 64).total / 2**30
    refuse_what_cannot_fit(recipe, 64, device(needed / 1.09), force=False)
    assert "may not fit" in verdict(recipe, 64, device(needed / 1.09))
    with pytest.raises(LaunchError, match="--force") as caught:
        refuse_what_cannot_fit(recipe, 64, device(needed / 1.11), force=False)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    refuse_what_cannot_fit(recipe, 64, device(needed / 1.11), force=True)


def test_a_refusal_names_what_is_large_and_what_would_save_most():
    with pytest.raises(LaunchError, match=r"\(activations .*parallel\.activation_checkpointing=full saves \d+"):
        refuse_what_cannot_fit(load_recipe(RECIPE, TOO_MUCH), 64, H100, force=False)


def test_a_compiled_run_is_judged_by_the_least_that_the_compiler_may_keep():
    eager = load_recipe(RECIPE, TOO_MUCH)
    selective = load_recipe(RECIPE, [*TOO_MUCH, "parallel.activation_checkpointing=selective"])
    between = (memory_of(eager, 64).total + memory_of(selective, 64).total) / 2 / 1.1 / 2**30
    compiled = load_recipe(RECIPE, [*TOO_MUCH, "parallel.compile=true"])
    refuse_what_cannot_fit(compiled, 64, device(between), force=False)
    with pytest.raises(LaunchError):
        refuse_what_cannot_fit(eager, 64, device(between), force=False)


def test_on_cpus_nothing_is_printed_and_the_ranks_get_the_plan(capsys, tmp_path):
    recipe = load_recipe("recipes/laptop.yaml", [f"runs_dir={tmp_path}"])
    variables = check_before_run(recipe, Node(2), None, force=False, on_gpus=False)
    plan = json.loads(variables[PLAN_VARIABLE])
    assert sum(plan["parts"].values()) > 2**28
    assert all("saves" in change for change in plan["changes"])
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_model_whose_state_no_host_memory_holds_is_refused_on_cpus(tmp_path):
    recipe = load_recipe("recipes/llama-70b.yaml", [f"runs_dir={tmp_path}", "parallel.tensor=1"])
    with pytest.raises(LaunchError, match=r"weights and optimizer state of 1 ranks need 7\d\d\.\d GiB"):
        check_before_run(recipe, Node(1), None, force=False, on_gpus=False)
    assert check_before_run(recipe, Node(1), None, force=True, on_gpus=False)


def test_a_run_that_has_saved_a_checkpoint_is_not_refused(tmp_path):
    recipe = load_recipe("recipes/laptop.yaml", [f"runs_dir={tmp_path}"])
    with pytest.raises(LaunchError):
        check_before_run(recipe, Node(1), device(0.5), force=False, on_gpus=True)
    (tmp_path / recipe.name / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert check_before_run(recipe, Node(1), device(0.5), force=False, on_gpus=True)


def test_a_layout_that_the_ranks_refuse_has_no_plan(tmp_path):
    recipe = load_recipe("recipes/llama-70b.yaml", [f"runs_dir={tmp_path}"])
    assert check_before_run(recipe, Node(3), device(80), force=False, on_gpus=True) == {}


@pytest.mark.parametrize(("flags", "backend"), [("fpu avx2", "slow_cpu"), ("fpu avx512bw amx_bf16", "cpu")])
def test_a_cpu_without_products_in_16_bits_is_known_by_its_flags(tmp_path, monkeypatch, flags, backend):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(verdicts, "CPUINFO", tmp_path / "cpuinfo")
    assert verdicts.host_backend() == backend


def test_submit_prints_the_verdict_and_refuses_what_cannot_fit(tmp_path, capsys):
    site = tmp_path / "site.env"
    site.write_text("GPUS_PER_NODE=h100:8\n")
    submit = ["submit", "recipes/llama-70b.yaml", "--dry-run", "--cluster", str(site)]
    assert cli.main([*submit, "--nodes", "128"]) == 0
    assert "plan: " in capsys.readouterr().err
    assert cli.main([*submit, "--nodes", "2"]) == 2
    error = capsys.readouterr().err
    assert "add --force to start it all the same" in error
    assert error.count("\n") == 1
    assert cli.main([*submit, "--nodes", "2", "--force"]) == 0
    assert "ALLOW=(--force)" in capsys.readouterr().out


def test_submit_says_nothing_about_gpus_that_it_does_not_know(tmp_path, capsys):
    site = tmp_path / "site.env"
    site.write_text("GPUS_PER_NODE=8\n")
    assert cli.main(["submit", "recipes/llama-70b.yaml", "--dry-run", "--cluster", str(site), "--nodes", "2"]) == 0
    assert capsys.readouterr().err == ""
