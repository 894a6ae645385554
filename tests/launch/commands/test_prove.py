import json
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cli import main
from launch.commands.prove import KINDS, Check, Report, draw, few_steps, parse_layout
from launch.proof import trial
from launch.proof.replay import different_steps, verdict
from launch.proof.trial import Trial, command, newest_checkpoint
from parallel.errors import LaunchError
from train.config import Recipe
from train.errors import ConfigError
from train.health.injected_faults import NAMES


def recipe(**optim: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "long",
            "model": {"vocab_size": 64, "seq_len": 8, "n_layers": 1, "n_heads": 1, "d_model": 8},
            "data": {"sources": [{"path": "data"}]},
            "optim": {"lr": 1e-3, **optim},
            "train": {"steps": 100_000, "global_batch_size": 4, "micro_batch_size": 1},
        }
    )


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(8, 60))
def test_faults_are_drawn_within_the_run_and_where_they_can_strike(seed: int, ranks: int, steps: int) -> None:
    every = steps // 4
    faults = draw(KINDS, ranks, steps, every, random.Random(seed))
    assert faults == draw(KINDS, ranks, steps, every, random.Random(seed))
    for fault in faults:
        assert fault["fault"] in NAMES
        assert 0 <= fault["rank"] < ranks
        assert 1 <= fault["step"] < steps
        if fault["phase"] == "save":
            assert fault["step"] % every == 0
        if fault["fault"].endswith("shard"):
            assert fault["step"] >= 3 * every, "there is a checkpoint to harm, and another one"
    assert sum(fault["fault"] == "kill" for fault in faults) == 1 + ranks


def test_an_unknown_kind_of_fault_is_refused() -> None:
    with pytest.raises(ConfigError, match="--faults: flood is none of rank, group, save, torn, stop"):
        draw(["flood"], 2, 12, 3, random.Random(0))


def test_a_long_recipe_is_cut_to_a_few_steps() -> None:
    overrides = few_steps(recipe(warmup_steps=2000), 12, 3)
    assert "train.steps=12" in overrides
    assert "optim.warmup_steps=6" in overrides
    assert not [override for override in overrides if override.startswith("optim.decay_steps")]
    assert "optim.decay_steps=3" in few_steps(recipe(schedule="wsd", decay_steps=5000), 12, 3)


def test_layouts_are_engine_and_ranks() -> None:
    assert parse_layout("zero3:4") == ("zero3", 4)
    for wrong in ("ddp", "ddp:", "ddp:0", "ddp:x"):
        with pytest.raises(ConfigError, match=f"--also {wrong} must be ENGINE:RANKS"):
            parse_layout(wrong)


def test_a_report_passes_only_if_every_check_does() -> None:
    report = Report({"recipe": "laptop.yaml"}, [{"fault": "kill", "rank": 1, "step": 7, "phase": "forward"}])
    report.checks.append(Check("losses are equal", True, "12 steps, bit for bit"))
    assert report.passed
    assert report.as_text().endswith("PASSED\n")
    report.checks.append(Check("weights are equal", False, "model.embed: 3 of 9 elements differ"))
    assert not report.passed
    assert json.loads(json.dumps(report.as_json()))["passed"] is False
    text = report.as_text()
    assert text.endswith("FAILED\n")
    assert "kill on rank 1 after step 7, in forward" in text
    assert "[FAILS] weights are equal" in text
    assert len(text.splitlines()) < 60, "one page"


def test_runs_are_started_here_or_by_srun_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command({}, 2, 1, False)[-3:] == ["run", "--ranks", "2"]
    monkeypatch.setattr(trial, "_first_node", lambda nodes: "10.0.0.7" if nodes == "n[1-4]" else "?")
    env = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_ID": "5"}
    argv = command(env, 8, 2, False)
    assert argv[:3] == ["srun", "--ntasks=4", "--ntasks-per-node=1"]
    assert argv[-6:] == ["--ranks", "8", "--nodes", "4", "--head", "10.0.0.7:20087"]
    assert command(env, 8, 3, False)[-1] != argv[-1], "another port for another start"
    assert command(env, 1, 1, True)[-2:] == ["--ranks", "1"]


def test_the_newest_checkpoint_before_a_step_is_found(tmp_path: Path) -> None:
    for name in ("step-00000003", "step-00000006", ".step-00000009.partial-x", "damaged-step-00000004-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path, 5) == 3
    assert newest_checkpoint(tmp_path, 6) == 6
    with pytest.raises(LaunchError, match="no checkpoint of step 2 or an earlier one"):
        newest_checkpoint(tmp_path, 2)


def test_a_run_that_cannot_go_on_is_an_error_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "command", lambda *_: ["sh", "-c", "echo no; exit 2", "sh"])
    with pytest.raises(LaunchError, match=r"run broken ended with exit code 2; .*broken\.log"):
        Trial("recipe.yaml", "broken", tmp_path, [], 1).train([], 0)
    assert (tmp_path / "broken.log").read_text() == "no\n"


def test_a_stopped_run_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "stopped-once"
    script = f"[ -e {flag} ] && exit 0; touch {flag}; exit 75"
    monkeypatch.setattr(trial, "command", lambda *_: ["sh", "-c", script, "sh"])
    Trial("recipe.yaml", "stopped", tmp_path, [], 1).train([], 0)
    assert flag.exists()


def test_a_replay_names_the_first_step_that_differs() -> None:
    one = {step: (1.0 / step, 0.5) for step in range(1, 9)}
    assert different_steps(one, dict(one), 4, 8) == []
    assert different_steps(one, one | {6: (1.0 / 6, 0.25), 7: (9.0, 0.5)}, 4, 8) == [6, 7]
    with pytest.raises(LaunchError, match=r"no metrics of the steps \[9\]"):
        different_steps(one, one, 4, 9)
    text = verdict(Path("runs/x"), 3, 8, [6, 7], [1])
    assert "differ from step 6 on" in text
    assert "the weights or moments that rank 1 saved differ" in text
    assert "no checkpoint of step 8" in verdict(Path("runs/x"), 3, 8, [], None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a recipe, or --replay RUN --step N"),
        (["recipes/laptop.yaml", "--steps", "5"], r"--steps (5) must be at least 8"),
        (["--replay", "no/such/run", "--step", "3"], "is not a run's folder"),
        (["--replay", "no/such/run"], "--replay needs --step N"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["prove", *argv, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_an_output_folder_with_something_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["prove", "recipes/laptop.yaml", "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    shutil.rmtree(tmp_path)
