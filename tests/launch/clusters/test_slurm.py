"""The rendered job script, run without Slurm."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from launch import cli
from launch.clusters.options import check_time, gpu_count, sbatch_options
from launch.clusters.slurm import read_site, render
from parallel.errors import LaunchError

SITE = "slurm/cluster.env.example"
DATA = "data.sources.0.path=tests/earlier_version/data"
SUBMIT = ["submit", "recipes/laptop.yaml", "train.steps=50", "runs_dir=my runs", "--dry-run"]


def rendered(capsys, *options: str) -> str:
    assert cli.main([*SUBMIT, *options]) == 0
    return capsys.readouterr().out


def shellcheck(script: str) -> None:
    tool = Path(sys.executable).with_name("shellcheck")
    result = subprocess.run([str(tool), "-"], input=script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_the_script_of_a_gpu_site(capsys):
    script = rendered(capsys, "--nodes", "4", "--cluster", SITE, "train.global_batch_size=128")
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclude=node[017,113]",
        "#SBATCH --exclusive",
        "#SBATCH --signal=USR2@180",
        f"#SBATCH --output='{Path.cwd()}/my runs/laptop/logs/slurm-%j.log'",
    ):
        assert line in script.splitlines()
    assert f"RECIPE={Path.cwd()}/recipes/laptop.yaml\n" in script
    assert "OVERRIDES=(train.steps=50 'runs_dir=my runs' train.global_batch_size=128)" in script
    assert "RANKS=(--ranks 8)" in script
    assert "NODE_SETUP='module load cuda/13.0'" in script
    shellcheck(script)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("PYXIS_IMAGE=a.sqsh", "SRUN=(--container-image=a.sqsh --container-mounts=/d:/d)"),
        ("APPTAINER_IMAGE=a.sif", "WRAP=(apptainer exec --nv --bind /d:/d a.sif)"),
        ("NETWORK_INTERFACE=ib0", "NODE_SETUP='export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0'"),
    ],
)
def test_containers_and_networks(tmp_path, capsys, line, expected):
    (tmp_path / "cluster.env").write_text(f"{line}\nMOUNTS=/d:/d\n")
    script = rendered(capsys, "--cluster", str(tmp_path / "cluster.env"))
    assert expected in script
    assert ("PYTHON=python3 " in script) is line.endswith((".sqsh", ".sif"))
    shellcheck(script)


FAKE = """\
#!/bin/bash
echo "$(basename "$0")" "${@@Q}" >>"$CALLS"
while [[ $1 == -* || $1 == exec || $1 == *.sif || $1 == *:* ]]; do shift; done
exec "$@"
"""
FAKE_PYTHON = f"""\
#!/bin/bash
echo python "${{@@Q}}" >>"$CALLS"
[[ $3 == launch.supervise.network ]] && exec {sys.executable} "$@"
exit 0
"""


@pytest.mark.parametrize(
    ("line", "srun", "wrapped"),
    [
        ("", "", ""),
        ("PYXIS_IMAGE='my image.sqsh'", "'--container-image=my image.sqsh' '--container-mounts=/d:/d' ", ""),
        ("APPTAINER_IMAGE=a.sif", "", "'apptainer' 'exec' '--nv' '--bind' '/d:/d' 'a.sif' "),
    ],
)
def test_the_script_starts_health_check_and_run_in_each_kind_of_container(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, srun: str, wrapped: str
) -> None:
    """Run by bash, with stand-ins for srun, scontrol, apptainer and Python that record how they are called."""
    for name in ("srun", "apptainer"):
        (tmp_path / name).write_text(FAKE)
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho NodeAddr=10.0.0.1 JobState=RUNNING Reason=None\n")
    (tmp_path / "python").write_text(FAKE_PYTHON)
    for name in ("srun", "apptainer", "scontrol", "python"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "cluster.env").write_text(f"{line}\nMOUNTS=/d:/d\nPYTHON={tmp_path}/python\n")
    script = rendered(
        capsys, "--cluster", str(tmp_path / "cluster.env"), f"runs_dir={tmp_path}/my runs", "--ranks", "2"
    )
    env = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1", "CALLS": str(tmp_path / "calls")}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", script], env=env, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    options = f"'--ntasks=1' '--ntasks-per-node=1' {srun}{wrapped}'{tmp_path}/python' '-P' '-m'"
    asked = [line.removeprefix(f"srun {options} ") for line in calls if line.startswith("srun ")]
    run = f"'{tmp_path}/my runs/laptop'"
    assert asked == [
        f"'launch.supervise.health' 'check' '--run' {run} '--nodes' '1' '--head' '10.0.0.1:20119'",
        f"'launch.cli' 'run' '{Path.cwd()}/recipes/laptop.yaml' 'train.steps=50' 'runs_dir=my runs' "
        f"'runs_dir={tmp_path}/my runs' "
        "'--ranks' '2' '--nodes' '1' '--head' '10.0.0.1:20119' '--stop-seconds' '150'",
    ]
    here = [line for line in calls if "'launch.supervise.requeue'" in line and line.startswith("python ")]
    assert len(here) == 2, calls
    assert sum(line.startswith("apptainer ") for line in calls) == (6 if wrapped else 0)


@pytest.mark.parametrize(("cpus", "exported"), [("24", "24"), ("", "none")])
def test_srun_gets_the_cpus_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cpus: str, exported: str
) -> None:
    """Since Slurm 22.05 srun ignores the job's `--cpus-per-task`, so all ranks of a node may share one core."""
    (tmp_path / "srun").write_text('#!/bin/bash\necho "${SRUN_CPUS_PER_TASK-none}" >>"$CALLS"\n')
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho NodeAddr=10.0.0.1 JobState=RUNNING Reason=None\n")
    (tmp_path / "python").write_text("#!/bin/bash\n")
    for name in ("srun", "scontrol", "python"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "cluster.env").write_text(f"PYTHON={tmp_path}/python\nCPUS_PER_NODE=24\n")
    script = rendered(capsys, "--cluster", str(tmp_path / "cluster.env"), f"runs_dir={tmp_path}/runs", "--ranks", "2")
    assert "#SBATCH --cpus-per-task=24\n" in script  # from which Slurm sets SLURM_CPUS_PER_TASK
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SRUN"))}
    env |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1", "CALLS": str(tmp_path / "calls")}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({"SLURM_CPUS_PER_TASK": cpus} if cpus else {})
    subprocess.run(["bash", "-c", script], env=env, check=True, capture_output=True)
    assert (tmp_path / "calls").read_text().split() == [exported] * 2  # the health check and the run


def test_a_sweep_is_an_array_with_one_override_a_task(capsys):
    script = rendered(capsys, "--sweep", "optim.lr=1e-3,2e-3,4e-3")
    assert "#SBATCH --array=0-2" in script
    assert "SWEEP=('lr-1e-3 optim.lr=1e-3' 'lr-2e-3 optim.lr=2e-3' 'lr-4e-3 optim.lr=4e-3')" in script
    assert "slurm-%A-%a.log" in script
    shellcheck(script)


def test_two_sweeps_train_each_combination(capsys):
    script = rendered(capsys, "--sweep", "optim.lr=1e-3,2e-3", "--sweep", "train.seed=1,2")
    assert "#SBATCH --array=0-3" in script
    tasks = [f"'lr-{lr}-seed-{seed} optim.lr={lr} train.seed={seed}'" for lr in ("1e-3", "2e-3") for seed in (1, 2)]
    assert f"SWEEP=({' '.join(tasks)})" in script
    shellcheck(script)


def test_options_of_sbatch_keep_quotes_and_short_names(tmp_path, capsys):
    (tmp_path / "cluster.env").write_text("""SBATCH_OPTIONS="--comment='two words' -C a100 --mem 0"\nTIME=1-12\n""")
    after = ["--cluster", str(tmp_path / "cluster.env"), "--", "--exclusive", "-t", "2:00:00", "--comment=it's"]
    lines = rendered(capsys, *after).splitlines()
    for line in (
        "#SBATCH -C a100",
        "#SBATCH --mem=0",
        "#SBATCH --exclusive",
        "#SBATCH --time=1-12",
        "#SBATCH -t 2:00:00",
        "#SBATCH --comment='it'\"'\"'s'",
        "OVERRIDES=(train.steps=50 'runs_dir=my runs')",
    ):
        assert any(each.startswith(line) for each in lines), line
    assert sbatch_options(["-Ca100", "--comment=two words"]) == {"-C": "a100", "comment": "two words"}


@pytest.mark.parametrize("text", ["90", "90:30", "12:00:00", "1-12", "1-12:30", "1-12:30:00", "UNLIMITED", "infinite"])
def test_slurms_time_formats_are_accepted(text):
    assert check_time("--time", text) == text


@pytest.mark.parametrize("text", ["", "banana", "1h", "1:2:3:4", "-5", "1-", "1.5", "1-2-3", "24:00:00 ", "inf"])
def test_other_times_are_refused(text):
    with pytest.raises(LaunchError, match="must be a time limit"):
        check_time("--time", text)


@pytest.mark.parametrize(
    ("text", "gpus"), [("8", 8), ("h100:8", 8), ("h100", 1), ("a100:4,h100:2", 6), ("nvidia_a100-80gb.2:4", 4)]
)
def test_gpus_of_a_node_may_have_a_type(text, gpus):
    assert gpu_count(text) == gpus


def test_gpus_that_are_no_number_are_refused(tmp_path, capsys):
    for line, message in (
        ("GPUS_PER_NODE=h100:", "GPUS_PER_NODE (h100:) must read NUMBER or TYPE:NUMBER"),
        ("RANKS_PER_NODE=two", "RANKS_PER_NODE (two) in the site's file must be an integer of at least 1"),
        ("WARN_SECONDS=3m", "WARN_SECONDS (3m) in the site's file must be an integer"),
        ("TIME=soon", "TIME (soon) must be a time limit"),
    ):
        (tmp_path / "cluster.env").write_text(line)
        assert cli.main([*SUBMIT, "--cluster", str(tmp_path / "cluster.env")]) == 2
        assert message in capsys.readouterr().err


def test_ranks_of_a_node_are_its_gpus_without_their_type(tmp_path, capsys):
    (tmp_path / "cluster.env").write_text("GPUS_PER_NODE=h100:8\n")
    script = rendered(capsys, "--cluster", str(tmp_path / "cluster.env"), "train.micro_batch_size=2")
    assert "#SBATCH --gpus-per-node=h100:8\n" in script
    assert "RANKS=(--ranks 8)" in script


def test_differences_that_are_allowed_reach_the_run(capsys):
    script = rendered(capsys, "--allow", "schedule")
    assert "ALLOW=(--allow=schedule)" in script
    assert '"${RANKS[@]}" "${ALLOW[@]}"' in script


def test_missing_data_are_reported_before_a_job_waits(tmp_path, capsys):
    submit = ["submit", "recipes/laptop.yaml", f"runs_dir={tmp_path}", "data.sources.0.path=/nowhere"]
    assert cli.main(submit) == 2
    assert (
        "data.sources.0.path (/nowhere) does not exist on this machine; build the data set" in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


def test_a_range_of_nodes_lets_the_run_shrink(capsys):
    assert "#SBATCH --nodes=2-4\n" in rendered(capsys, "--nodes", "4", "--min-nodes", "2")


def test_rendering_replaces_each_line_once_and_adds_what_is_missing():
    template = files("slurm").joinpath("train.sbatch").read_text()
    script = render(template, {"nodes": "7", "qos": "low", "exclusive": None}, {"PYTHON": "python4"})
    assert script.count("#SBATCH --nodes=7\n") == 1
    assert "\n#SBATCH --qos=low\n#SBATCH --exclusive\n" in script
    assert script.count("PYTHON=python4 ") == 1
    assert len(script.splitlines()) == len(template.splitlines()) + 2
    shellcheck(template)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "--nodes (0) must be at least --min-nodes (1), which must be at least 1"),
        (["--nodes", "2", "--min-nodes", "3"], "--nodes (2) must be at least --min-nodes (3)"),
        (["--sweep", "optim.lr"], "--sweep optim.lr must read SECTION.KEY=A,B,C"),
        (["--sweep", "optim.lr=1e-3,fast"], "optim.lr ('fast')"),
        (["--sweep", "optim.lr=1e-3", "--sweep", "optim.lr=2e-3"], "two --sweep name optim.lr"),
        (["--time", "banana"], "--time (banana) must be a time limit in Slurm's format"),
        (["--time", "-5"], "--time (-5) must be a time limit"),
        (["--ranks", "0"], "--ranks (0) must be at least 1"),
        (["--requeue-limit", "-1"], "--requeue-limit (-1) must be at least 0"),
        (
            ["--ranks", "3"],
            "3 ranks (1 nodes x 3) do not fit the recipe: train.global_batch_size (16) must be a multiple",
        ),
        (
            ["--ranks", "1", "--nodes", "4", "--min-nodes", "2"],
            "3 ranks (3 nodes x 1), which --min-nodes 2 --nodes 4 allows, do not fit the recipe",
        ),
        (["--ranks", "2", "parallel.engine=single"], "parallel.engine single runs in one process"),
        (["--ranks", "1", "--sweep", "train.micro_batch_size=4,5"], "train.micro_batch_size (5)"),
        (["--", "--mem=0", "stray"], "stray belongs to no option of sbatch"),
        (["--cluster", "nowhere.env"], "the site's file nowhere.env cannot be read"),
    ],
)
def test_wrong_options_are_reported_before_anything_is_submitted(options, message, capsys):
    assert cli.main([*SUBMIT, *options]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_setting_of_the_site_is_reported(tmp_path):
    (tmp_path / "cluster.env").write_text("PARTITON=gpu\n")
    with pytest.raises(LaunchError, match="has PARTITON, which is not one of ACCOUNT"):
        read_site(tmp_path / "cluster.env")


def test_without_slurm_the_error_says_so_and_the_script_is_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["submit", "recipes/laptop.yaml", f"runs_dir={tmp_path}", DATA]) == 2
    assert "there is no sbatch on this machine; submit from a login node" in capsys.readouterr().err
    assert (tmp_path / "laptop/train.sbatch").exists()


def test_each_job_of_a_chain_waits_for_the_one_before(tmp_path, capsys, monkeypatch):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/calls\necho $((6 + $(wc -l <{tmp_path}/calls)))\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    assert (
        cli.main(
            ["submit", "recipes/laptop.yaml", f"runs_dir={tmp_path}", DATA, "--chain", "3", "--requeue-limit", "4"]
        )
        == 0
    )
    script = tmp_path / "laptop/train.sbatch"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"--parsable {script}",
        f"--parsable --dependency=afterany:7 {script}",
        f"--parsable --dependency=afterany:8 {script}",
    ]
    assert "\nREQUEUE_LIMIT=4 " in script.read_text()
    output = capsys.readouterr().out
    assert f"job 9 submitted: {script}\n" in output
    events = [json.loads(line) for line in (tmp_path / "laptop/events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["jobs"]) for event in events] == [("submitted", ["7", "8", "9"])]
    assert f"watch  tail -F {tmp_path}/laptop/logs/slurm-7.log\nstate  squeue --job 7,8,9; " in output


def test_submitted_jobs_as_json_and_a_refused_one(tmp_path, capsys, monkeypatch):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/bash\n[[ $2 == --dependency=* ]] && { echo quota >&2; exit 1; }\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    submit = ["submit", "recipes/laptop.yaml", f"runs_dir={tmp_path}", DATA]
    assert cli.main([*submit, "--json"]) == 0
    run = f"{tmp_path}/laptop"
    assert json.loads(capsys.readouterr().out) == {
        "jobs": ["7"],
        "script": f"{run}/train.sbatch",
        "log": f"{run}/logs/slurm-7.log",
        "run": run,
    }
    assert cli.main([*submit, "--chain", "2"]) == 2
    assert f"Slurm refused {run}/train.sbatch: quota; submitted before that: 7" in capsys.readouterr().err


def test_submit_needs_no_torch():
    code = "import sys; from launch import cli; cli.main(sys.argv[1:]); print('torch' in sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code, *SUBMIT], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "False"
