"""The rendered job script, without Slurm."""

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from launch import cli
from launch.clusters.slurm import read_site, render
from parallel.errors import LaunchError

SITE = "slurm/cluster.env.example"
SUBMIT = ["submit", "recipes/laptop.yaml", "train.steps=50", "runs_dir=my runs", "--dry-run"]


def rendered(capsys, *options: str) -> str:
    assert cli.main([*SUBMIT, *options]) == 0
    return capsys.readouterr().out


def shellcheck(script: str) -> None:
    tool = Path(sys.executable).with_name("shellcheck")
    result = subprocess.run([str(tool), "-"], input=script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_the_script_of_a_gpu_site(capsys):
    script = rendered(capsys, "--nodes", "4", "--cluster", SITE)
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclude=node[017,113]",
        "#SBATCH --exclusive",
        "#SBATCH --signal=USR2@180",
        f"#SBATCH --output={Path.cwd()}/my runs/laptop/logs/slurm-%j.log",
    ):
        assert line in script.splitlines()
    assert f"RECIPE={Path.cwd()}/recipes/laptop.yaml\n" in script
    assert "OVERRIDES=(train.steps=50 'runs_dir=my runs')" in script
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
echo "$(basename "$0")" "${@@Q}" >>"$SAID"
while [[ $1 == -* || $1 == exec || $1 == *.sif || $1 == *:* ]]; do shift; done
exec "$@"
"""


@pytest.mark.parametrize(
    ("line", "srun", "wrapped"),
    [
        ("", "", ""),
        ("PYXIS_IMAGE='my image.sqsh'", "'--container-image=my image.sqsh' '--container-mounts=/d:/d' ", ""),
        ("APPTAINER_IMAGE=a.sif", "", "'apptainer' 'exec' '--nv' '--bind' '/d:/d' 'a.sif' "),
    ],
)
def test_the_script_starts_what_it_should_in_each_kind_of_container(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, srun: str, wrapped: str
) -> None:
    """Run by bash, with stand-ins for srun, scontrol, apptainer and Python that say how they were called."""
    for name in ("srun", "apptainer"):
        (tmp_path / name).write_text(FAKE)
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho NodeAddr=10.0.0.1 JobState=RUNNING Reason=None\n")
    (tmp_path / "python").write_text('#!/bin/bash\necho python "${@@Q}" >>"$SAID"\n')
    for name in ("srun", "apptainer", "scontrol", "python"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "cluster.env").write_text(f"{line}\nMOUNTS=/d:/d\nPYTHON={tmp_path}/python\n")
    script = rendered(
        capsys, "--cluster", str(tmp_path / "cluster.env"), f"runs_dir={tmp_path}/my runs", "--ranks", "2"
    )
    env = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1", "SAID": str(tmp_path / "said")}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", script], env=env, check=True, capture_output=True)
    said = (tmp_path / "said").read_text().splitlines()
    options = f"'--ntasks=1' '--ntasks-per-node=1' {srun}{wrapped}'{tmp_path}/python' '-P' '-m'"
    asked = [line.removeprefix(f"srun {options} ") for line in said if line.startswith("srun ")]
    run = f"'{tmp_path}/my runs/laptop'"
    assert asked == [
        f"'launch.supervise.health' 'check' '--run' {run} '--nodes' '1' '--head' '10.0.0.1:20119'",
        f"'launch.cli' 'run' '{Path.cwd()}/recipes/laptop.yaml' 'train.steps=50' 'runs_dir=my runs' "
        f"'runs_dir={tmp_path}/my runs' "
        "'--ranks' '2' '--nodes' '1' '--head' '10.0.0.1:20119' '--stop-seconds' '150'",
    ]
    here = [line for line in said if "'launch.supervise.requeue'" in line and line.startswith("python ")]
    assert len(here) == 2, said
    assert sum(line.startswith("apptainer ") for line in said) == (5 if wrapped else 0)


def test_a_sweep_is_an_array_with_one_override_a_task(capsys):
    script = rendered(capsys, "--sweep", "optim.lr=1e-3,2e-3,4e-3")
    assert "#SBATCH --array=0-2" in script
    assert "SWEEP=(optim.lr=1e-3 optim.lr=2e-3 optim.lr=4e-3)" in script
    assert "slurm-%A-%a.log" in script
    shellcheck(script)


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
        (["--nodes", "0"], "--nodes (0) must be at least --min-nodes (1), and that 1"),
        (["--nodes", "2", "--min-nodes", "3"], "--nodes (2) must be at least --min-nodes (3)"),
        (["--sweep", "optim.lr"], "--sweep optim.lr must read SECTION.KEY=A,B,C"),
        (["--sweep", "optim.lr=1e-3,fast"], "optim.lr ('fast')"),
        (["--cluster", "nowhere.env"], "the site's file nowhere.env cannot be read"),
    ],
)
def test_what_cannot_be_submitted_is_said_at_once(options, message, capsys):
    assert cli.main([*SUBMIT, *options]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_line_of_the_sites_file_is_named(tmp_path):
    (tmp_path / "cluster.env").write_text("PARTITON=gpu\n")
    with pytest.raises(LaunchError, match="has PARTITON, which is none of ACCOUNT"):
        read_site(tmp_path / "cluster.env")


def test_without_slurm_it_says_so_and_keeps_the_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["submit", "recipes/laptop.yaml", f"runs_dir={tmp_path}"]) == 2
    assert "there is no sbatch on this machine; submit from a login node" in capsys.readouterr().err
    assert (tmp_path / "laptop/train.sbatch").exists()


def test_each_job_of_a_chain_waits_for_the_one_before_and_the_first_is_watched(tmp_path, capsys, monkeypatch):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/said\necho $((6 + $(wc -l <{tmp_path}/said)))\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    assert (
        cli.main(["submit", "recipes/laptop.yaml", f"runs_dir={tmp_path}", "--chain", "3", "--requeue-limit", "4"]) == 0
    )
    script = tmp_path / "laptop/train.sbatch"
    assert (tmp_path / "said").read_text().splitlines() == [
        f"--parsable {script}",
        f"--parsable --dependency=afterany:7 {script}",
        f"--parsable --dependency=afterany:8 {script}",
    ]
    assert "\nREQUEUE_LIMIT=4 " in script.read_text()
    said = capsys.readouterr().out
    assert f"watch  tail -F {tmp_path}/laptop/logs/slurm-7.log\nstate  squeue --job 7,8,9; " in said


def test_submit_needs_no_torch():
    code = "import sys; from launch import cli; cli.main(sys.argv[1:]); print('torch' in sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code, *SUBMIT], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "False"
