"""The plan beside a few real steps on this machine. Times are printed, not judged."""

import tempfile
from pathlib import Path

import pytest

from launch.doctor.measure import as_machine
from launch.plan.checked.measure import Comparison, print_comparison, run_steps
from launch.plan.estimate import Assumptions, plan_recipe
from launch.plan.machine import Machine
from parallel.errors import LaunchError
from train.config_file import load_recipe

SETTINGS = [
    "model.vocab_size=1024",
    "model.d_model=64",
    "model.n_layers=2",
    "model.seq_len=64",
    "train.global_batch_size=8",
    "parallel.engine=single",
    "parallel.device=cpu",
    "parallel.activation_checkpointing=none",
]
FIGURES = {
    "devices": 0.0,
    "matmul_bf16_flops_per_second": 5e10,
    "copy_bytes_per_second": 8e9,
    "memory_bytes": 16e9,
}


@pytest.mark.parametrize(("has_16_bits", "backend"), [(False, "slow_cpu"), (True, "cpu")])
def test_the_doctors_figures_are_a_machine(has_16_bits, backend):
    machine = Machine.model_validate(as_machine(FIGURES, has_16_bits=has_16_bits))
    assert machine.backend == backend
    assert machine.best("bf16") == machine.best("fp32") * (1 if not has_16_bits else 8) == 5e10
    assert (machine.memory_bytes, machine.link_gb_s, machine.domain) == (16e9, 1.0, 1)


def test_a_measured_all_reduce_is_the_speed_of_the_links():
    figures = FIGURES | {"devices": 8.0, "ranks": 16.0, "all_reduce_bytes_per_second": 3e9}
    machine = Machine.model_validate(as_machine(figures, has_16_bits=True))
    assert (machine.backend, machine.link_gb_s, machine.domain) == ("gpu", 3.0, 16)


def test_a_plan_and_a_real_run_are_shown_side_by_side(capsys):
    recipe = load_recipe("recipes/laptop.yaml", SETTINGS)
    machine = Machine.model_validate(as_machine(FIGURES, has_16_bits=False))
    before = set(Path(tempfile.gettempdir()).glob("keepstep-plan-*"))
    with tempfile.TemporaryDirectory(prefix="keepstep-plan-") as scratch:
        peak, seconds = run_steps(recipe, 1, Path(scratch), steps=2)
    assert set(Path(tempfile.gettempdir()).glob("keepstep-plan-*")) <= before
    found = Comparison(plan_recipe(recipe, 1, machine, Assumptions()), peak, seconds)
    assert found.plan.memory.total == pytest.approx(peak, rel=0.25)  # nearly all of it is libraries
    print_comparison(found)
    printed = capsys.readouterr().out
    assert "peak memory of a rank" in printed
    assert "fastest step" in printed


def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(LaunchError, match=r"the measured run failed: keepstep: .*--ranks|the measured run failed"):
        run_steps(load_recipe("recipes/laptop.yaml", [*SETTINGS, "parallel.device=cuda"]), 1, tmp_path, steps=2)
