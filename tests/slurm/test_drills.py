"""Jobs on a real Slurm cluster: a quick drill, and cases that earlier failed. The other drills are marked slow."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import NAMES, Cluster
from tests.slurm.drills import DRILLS
from tests.slurm.lab import KEEPSTEP, ROOT, STEPS, Job, Lab
from tests.slurm.machines import processes_with, until
from train.records.jsonl import read_jsonl

QUICK = ("stop_signal",)

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.parametrize("name", QUICK)
def test_a_run_that_a_signal_stops_has_the_same_result_as_one_without_faults(lab: Lab, name: str) -> None:
    DRILLS[name](lab)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DRILLS if name not in QUICK])
def test_a_run_on_a_faulty_cluster_has_the_same_result_as_one_without_faults(tmp_path: Path, name: str) -> None:
    cluster = Cluster(tmp_path / "slurm", nodes=3).up()
    try:
        DRILLS[name](Lab(cluster, tmp_path))
    finally:
        cluster.down()


@pytest.mark.parametrize("command", ["scancel", "keepstep stop"])
def test_a_cancelled_or_stopped_run_is_saved_and_not_requeued(lab: Lab, command: str) -> None:
    job = Job(lab, command.replace(" ", "-")).submit("train.steps=5000")
    job.wait_step(12)
    steps = lab.cluster.slurm("scontrol", "-o", "show", "step", job.id)
    assert " CPUs=4 " in steps, steps  # CPUS_PER_NODE=2 on each node; without SRUN_CPUS_PER_TASK srun takes one
    if command == "scancel":
        lab.cluster.slurm("scancel", job.id)
    else:
        subprocess.run([*KEEPSTEP, "stop", str(job.folder)], cwd=ROOT, check=True, capture_output=True)
    until(lambda: "not requeued: " in job.log(), 300, "the decision of the job script")
    shown = lab.cluster.wait_job(job.id, ("CANCELLED", "FAILED"))
    assert shown["Restarts"] == "0", job.log()
    stopped = [event for event in read_jsonl(job.folder / "events.jsonl") if event["kind"] == "stopped"]
    assert (job.folder / f"checkpoints/step-{stopped[-1]['step']:08d}").exists()
    job.assert_no_process_left()


def test_a_stop_ends_the_chain_too(lab: Lab) -> None:
    job = Job(lab, "stopped-chain").submit("--nodes", "1", "--chain", "3", "train.steps=5000", "--", "--comment=a b")
    job.wait_step(12)
    subprocess.run([*KEEPSTEP, "stop", str(job.folder)], cwd=ROOT, check=True, capture_output=True)
    until(lambda: not lab.cluster.slurm("squeue", "-h"), 300, "all jobs to end")
    events = list(read_jsonl(job.folder / "events.jsonl"))
    assert [event["kind"] for event in events].count("started") == 1
    assert events[-1]["kind"] == "stopped"
    last = lab.cluster.job(str(int(job.id) + 2))
    assert last["ExitCode"] == "75:0"
    assert " Comment=a b " in lab.cluster.slurm("scontrol", "-o", "show", "job", job.id)
    assert not (job.folder / "STOP").exists()


def test_a_run_that_fails_for_good_is_not_requeued(lab: Lab) -> None:
    job = Job(lab, "for-good").submit("data.sources.0.path=/nowhere", "--skip-data-check")
    shown = lab.cluster.wait_job(job.id, ("FAILED",))
    assert (shown["Restarts"], shown["ExitCode"]) == ("0", "2:0"), job.log()
    assert "root cause: rank 0 on " in job.log()
    for noise in ("rendezvous of", "connection to node 0 broke", "Traceback", "RendezvousConnectionError"):
        assert noise not in job.log()
    assert "not requeued: failed for good" in job.log()


def test_an_unhealthy_node_is_named_and_excluded_from_the_next_attempt(lab: Lab) -> None:
    node = NAMES[0]
    lab.cluster.run(node, ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"])
    try:
        job = Job(lab, "unhealthy").submit("train.steps=5")
        lab.cluster.wait_job(job.id, ("COMPLETED",))
        assert job.reached() == 5, job.log()
        assert f"unhealthy {node}: 0.0 GiB free in /dev/shm, 0.1 needed" in job.log()
        assert lab.cluster.job(job.id)["ExcNodeList"] == node
    finally:
        lab.cluster.run(node, ["umount", "/dev/shm"])


def test_a_sweep_trains_each_value_in_its_own_folder_and_a_chain_stops_when_the_run_has_finished(lab: Lab) -> None:
    sweep = Job(lab, "sweep").submit("--nodes", "1", "--sweep", "optim.lr=1e-3,2e-3", "train.steps=5")
    chain = Job(lab, "chain").submit("--nodes", "1", "--chain", "2", "train.steps=5")
    until(lambda: not lab.cluster.slurm("squeue", "-h"), 600, "all jobs to end")
    losses = []
    for rate in ("1e-3", "2e-3"):
        task_job = Job(lab, f"sweep-lr-{rate}")
        assert task_job.reached() == 5, sweep.log()
        losses.append(task_job.losses()[5])
    assert losses[0] != losses[1]
    started = [event for event in read_jsonl(chain.folder / "events.jsonl") if event["kind"] == "started"]
    assert len(started) == 2, chain.log()
    assert len(chain.steps()) == 5


@pytest.mark.parametrize(
    "launcher",
    [
        ["torchrun", "--nproc-per-node=2", "-m", "train"],
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-P", "-m", "train"],
        ["deepspeed", "--num_accelerators=2", "--no_local_rank", "--module", "train"],
    ],
    ids=lambda launcher: launcher[0],
)
def test_other_launchers_give_the_same_losses(lab: Lab, launcher: list[str]) -> None:
    tool = str(Path(sys.executable).with_name(launcher[0]))
    argv = [tool, *launcher[1:], str(lab.recipe), f"name={launcher[0]}"]
    env = lab.cluster.env | {"GLOO_SOCKET_IFNAME": "lo", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    result = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert Job(lab, launcher[0]).losses() == lab.reference.losses()


def test_srun_python_needs_no_launcher(lab: Lab, cluster: Cluster) -> None:
    train = [sys.executable, "-P", "-m", "train", str(lab.recipe), "name=srun"]
    env = cluster.env | {"MASTER_ADDR": cluster.address(NAMES[0])}
    result = cluster.run(
        "ctl", ["srun", "-N2", f"--nodelist={','.join(NAMES[:2])}", "--kill-on-bad-exit=1", *train], cwd=ROOT, env=env
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert Job(lab, "srun").losses() == lab.reference.losses()


def test_srun_starts_ranks_through_pmix(lab: Lab, cluster: Cluster) -> None:
    train = [sys.executable, "-P", "-m", "train", str(lab.recipe), "name=pmix"]
    argv = ["srun", "-N2", "--mpi=pmix", "--kill-on-bad-exit=1", *train]
    result = cluster.run("ctl", argv, cwd=ROOT, env=cluster.env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert Job(lab, "pmix").losses() == lab.reference.losses()


def test_srun_with_an_mpi_that_does_not_fit_is_refused(cluster: Cluster) -> None:
    rank = [sys.executable, str(ROOT / "tests/parallel/mpi_rank.py")]
    result = cluster.run("ctl", ["srun", "-N2", "--mpi=pmi2", *rank], cwd=ROOT)
    assert result.returncode == 2
    assert "of 2, but Open MPI" in result.stdout
    assert "reports rank 0 of 1" in result.stdout


def test_two_nodes_started_by_hand_connect_although_their_names_resolve_to_127_0_1_1(
    lab: Lab, cluster: Cluster
) -> None:
    argv = [*KEEPSTEP, "run", str(lab.recipe), "name=by-hand", "--ranks", "1", "--nodes", "2"]
    argv += ["--head", f"{NAMES[0]}:29400"]
    nodes = [
        cluster.spawn(cluster.on(name, [*argv, "--node-rank", str(rank)]), f"by-hand-{name}.log")
        for rank, name in enumerate(NAMES[:2])
    ]
    codes = [node.wait(timeout=600) for node in nodes]
    logs = "\n".join((cluster.root / f"log/by-hand-{name}.log").read_text() for name in NAMES[:2])
    assert codes == [0, 0], logs
    assert Job(lab, "by-hand").losses() == lab.reference.losses()


def test_a_job_array_prepares_the_same_data_as_one_process(lab: Lab, tmp_path: Path) -> None:
    corpus = [str(lab.folder / "corpus.jsonl"), "--tokenizer", str(lab.folder / "tokenizer"), "--seq-len", "32"]
    build = [str(ROOT / "slurm/prepare.sbatch"), *corpus, "--out", str(tmp_path / "data")]
    options = ["--parsable", "--cpus-per-task=1", f"--output={tmp_path}/%A-%a.log"]
    array = lab.cluster.slurm("sbatch", *options, "--array=3-7:2", *build)
    final = lab.cluster.slurm("sbatch", *options, f"--dependency=afterok:{array}", *build)
    lab.cluster.wait_job(final, ("COMPLETED", "FAILED", "CANCELLED"))
    logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert [f"part {share}/3 is tokenized" in logs for share in range(3)] == [True] * 3, logs
    assert contents(tmp_path / "data") == contents(lab.folder / "data")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_keepstep_prove_passes_on_the_nodes_of_an_allocation(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "slurm", nodes=3).up()
    try:
        lab = Lab(cluster, tmp_path)
        prove = [*KEEPSTEP, "prove", str(lab.recipe), "--ranks", "1", "--out", str(tmp_path / "proof")]
        wrap = f"cd {ROOT} && exec {shlex.join(prove)}"
        options = ["--parsable", "-N2", "--ntasks-per-node=1", "--cpus-per-task=2", f"--output={tmp_path}/log"]
        job = cluster.slurm("sbatch", *options, "--wrap", wrap)
        shown = cluster.wait_job(job, ("COMPLETED", "FAILED"), 600)
        log = (tmp_path / "log").read_text()
        assert (shown["JobState"], shown["NumNodes"]) == ("COMPLETED", "2"), log
        report = json.loads((tmp_path / "proof/report.json").read_text())
        assert report["passed"], log
        assert not processes_with("SLURM_JOB_ID", job)
        print(log)
    finally:
        cluster.down()


@pytest.mark.slow
def test_a_run_resumes_with_fewer_nodes_and_the_same_samples(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "slurm", nodes=3).up()
    try:
        lab = Lab(cluster, tmp_path)
        job = Job(lab, "shrink").submit("--nodes", "3", "--min-nodes", "2")
        job.wait_step(12)
        cluster.power_off(job.worker_node())
        cluster.wait_job(job.id, ("COMPLETED",), 600)
        worlds = [e["world_size"] for e in read_jsonl(job.folder / "events.jsonl") if e["kind"] == "started"]
        assert (worlds[0], worlds[-1]) == (3, 2), job.log()
        tokens = {record["step"]: record["tokens"] for record in job.steps()}
        assert sorted(tokens) == list(range(1, STEPS + 1))
        reference = lab.reference.losses()
        assert job.losses() == pytest.approx(reference, rel=2e-3)
    finally:
        cluster.down()


def test_without_root_the_reason_why_machines_cannot_be_created_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.slurm import machines

    monkeypatch.setattr(machines.os, "getuid", lambda: 1000)
    assert machines.why_not() == "needs root for network namespaces"
