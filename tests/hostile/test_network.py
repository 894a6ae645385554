"""Real runs on machines of their own, and a stranger on the same network."""

import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from launch.supervise.secret import VARIABLE, new_secret
from tests.chaos.harness import RECIPE, ROOT, build_data
from tests.slurm.machines import Machines, processes_with, until, why_not
from train.exit_codes import STOPPED
from train.records.jsonl import read_jsonl

pytestmark = pytest.mark.skipif(
    bool(why_not()) and "CI" not in os.environ, reason=f"no machines can be simulated here: {why_not()}"
)
LIMIT_SECONDS = 600
PORT = 29400
MIB = 1 << 20


class Network:
    """Two machines that train, and one of a stranger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines = Machines(folder / "machines", ["one", "two", "stranger"])
        for name in (self.machines.hub, *self.machines.names):
            self.machines.power_on(name)
        self.recipe = folder / "recipe.json"  # JSON is YAML
        data = {"sources": [{"path": str(build_data(folder))}]}
        settings = {"train": {**RECIPE["train"], "steps": 1_000_000, "eval_every": 0}, "checkpoint": {"every": 10}}
        text = {**RECIPE, **settings, "name": "x", "runs_dir": str(folder / "runs"), "data": data}
        self.recipe.write_text(json.dumps(text))

    def run(
        self, machine: str, name: str, words: Sequence[str], engine: str = "ddp", **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a command in the recipe's run `name` on a machine."""
        argv = [sys.executable, "-m", *words, str(self.recipe), f"name={name}", f"parallel.engine={engine}"]
        env = self.machines.env | {"PYTHONPATH": str(ROOT)} | variables
        return self.machines.spawn(self.machines.on(machine, argv), f"{name}-{machine}.log", env)

    def steps(self, name: str) -> int:
        """The last step of a run."""
        metrics = self.folder / "runs" / name / "metrics.jsonl"
        return max((int(record["step"]) for record in read_jsonl(metrics) if "loss" in record), default=0)

    def wait_for(self, name: str, step: int) -> None:
        """Wait for a step of a run."""
        try:
            until(lambda: self.steps(name) >= step, LIMIT_SECONDS, f"step {step} of {name}")
        except TimeoutError as error:
            logs = (self.folder / "machines/log").glob(f"{name}-*.log")
            raise AssertionError(f"{error}\n" + "\n".join(log.read_text()[-3000:] for log in logs)) from None

    def ports(self, machine: str) -> list[tuple[str, str, int]]:
        """Protocol, address and port of each socket that can be reached from outside, if its address can."""
        lines = self.machines.run(machine, ["ss", "-Hltnu"]).stdout.splitlines()
        words = [line.split() for line in lines]
        ends = [(word[0], *word[4].rpartition(":")[::2]) for word in words]
        return [(kind, re.sub(r"%.*|[\[\]]", "", address), int(port)) for kind, address, port in ends]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    network = Network(tmp_path_factory.mktemp("network"))
    yield network
    network.machines.close()


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Ask commands to save and stop, and return their exit codes."""
    for process in processes:
        for child in psutil.Process(process.pid).children() or [psutil.Process(process.pid)]:
            child.send_signal(signal.SIGTERM)
    return [process.wait(LIMIT_SECONDS) for process in processes]


BY_HAND = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "one", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("way", ["launcher", "by hand", "one process"])
def test_a_run_on_one_machine_can_be_reached_from_no_other(network: Network, way: str) -> None:
    name = way.replace(" ", "-")
    match way:
        case "launcher":
            processes = [network.run("one", name, ["launch.cli", "run", "--ranks", "2"], "fsdp2")]
        case "by hand":
            ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
            processes = [network.run("one", name, ["train"], **BY_HAND, **rank) for rank in ranks]
        case _:
            processes = [network.run("one", name, ["train"], "single")]
    network.wait_for(name, 2)
    ports = network.ports("one")
    assert stop(processes) == [STOPPED] * len(processes)
    assert bool(ports) == (way != "one process")
    assert all(ipaddress.ip_address(address).is_loopback for _, address, _ in ports), ports


def test_a_stranger_on_the_network_neither_ends_a_run_nor_runs_code_in_it(network: Network, tmp_path: Path) -> None:
    machines, secret = network.machines, new_secret()
    head = machines.address("one")
    words = ["launch.cli", "run", "--ranks", "1", "--nodes", "2", "--head", f"{head}:{PORT}", "--node-rank"]
    processes = [
        network.run(machine, "two", [*words, str(rank)], **{VARIABLE: secret})
        for rank, machine in enumerate(("one", "two"))
    ]
    network.wait_for("two", 2)
    ports = network.ports("one")
    assert {address for _, address, _ in ports} == {head}  # and no other network of the machine
    (supervisor,) = psutil.Process(processes[0].pid).children()
    before = supervisor.memory_info().rss

    program = [sys.executable, str(ROOT / "tests/hostile/stranger.py"), head, str(PORT), str(tmp_path / "mark")]
    program += [str(port) for kind, _, port in ports if kind == "tcp"]
    done = machines.run("stranger", program)
    assert done.stdout == "done\n", done.stderr
    network.wait_for("two", network.steps("two") + 20)
    assert supervisor.memory_info().rss - before < 50 * MIB

    run = str(network.folder / "runs/two")
    commands = processes_with("KEEPSTEP_RUN", run)
    victim = next(pid for pid, command in commands.items() if is_rank(command))
    os.kill(victim, signal.SIGKILL)  # so that all nodes read the state of the rendezvous again
    until(lambda: len(starts(network, "two")) == 2, LIMIT_SECONDS, "a restart")
    network.wait_for("two", network.steps("two") + 2)
    commands |= processes_with("KEEPSTEP_RUN", run)
    with_secret = processes_with(VARIABLE, secret)
    assert stop(processes) == [STOPPED] * 2
    assert not (tmp_path / "mark").exists()
    assert any(is_rank(command) for command in commands.values())
    assert not any(is_rank(command) for command in with_secret.values())
    assert not any(secret in command for command in (*commands.values(), *with_secret.values()))
    written = [file for file in (network.folder / "runs/two").rglob("*") if file.is_file()]
    written += (network.folder / "machines/log").glob("two-*.log")
    assert not any(secret.encode() in file.read_bytes() for file in written)


def is_rank(command: str) -> bool:
    """Whether a command line is that of a rank. Launchers have it at the end of theirs."""
    return " -m train " in command and "launch." not in command


def starts(network: Network, name: str) -> list[object]:
    """The starts of a run."""
    return [
        event for event in read_jsonl(network.folder / "runs" / name / "events.jsonl") if event["kind"] == "started"
    ]
