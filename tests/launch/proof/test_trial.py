"""How a proof starts its runs and finds their checkpoints."""

from pathlib import Path

import pytest

from launch.proof import trial
from launch.proof.trial import FAULTS_VARIABLE, Trial, command, newest_step_up_to
from parallel.errors import LaunchError
from train.health.injected_faults import VARIABLE


def test_runs_are_started_here_or_by_srun_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command({}, 2, 1, False)[-3:] == ["run", "--ranks", "2"]
    monkeypatch.setattr(trial, "_first_node", lambda nodes: "10.0.0.7" if nodes == "n[1-4]" else "?")
    env = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_ID": "5"}
    argv = command(env, 8, 2, False)
    assert argv[:3] == ["srun", "--ntasks=4", "--ntasks-per-node=1"]
    assert argv[-6:] == ["--ranks", "8", "--nodes", "4", "--head", "10.0.0.7:20087"]
    assert command(env, 8, 3, False)[-1] != argv[-1], "another port for another start"
    assert command(env, 1, 1, True)[-2:] == ["--ranks", "1"]


def test_the_newest_checkpoint_up_to_a_step_is_found(tmp_path: Path) -> None:
    for name in ("step-00000003", "step-00000006", ".step-00000009.partial-x", "damaged-step-00000004-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_step_up_to(tmp_path, 5) == 3
    assert newest_step_up_to(tmp_path, 6) == 6
    with pytest.raises(LaunchError, match="no checkpoint of step 2 or an earlier one"):
        newest_step_up_to(tmp_path, 2)


def test_a_run_that_fails_is_an_error_that_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_faults_are_passed_in_the_variable_that_training_reads() -> None:
    assert FAULTS_VARIABLE == VARIABLE
