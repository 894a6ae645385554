"""The demonstration of `keepstep demo`: the whole system on this machine, by the commands that users run.

It writes a corpus, builds a data set and trains a small GPT on two ranks. One rank is killed, and the run resumes by
itself. The same steps without interruption give the reference. The two runs are compared; the model is exported and
continues a prompt.
"""

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import psutil

from launch.corpus import gather
from launch.terminal import duration, print_facts, size
from parallel.errors import LaunchError
from train.checkpoint.stores.steps import step_name
from train.records.jsonl import read_jsonl
from train.run_folder import RunFolder

RANKS = 2
VOCAB_SIZE = 4096
SEQ_LEN = 256
CORPUS_BYTES = 12_000_000
PROMPT = "def "


@dataclass(frozen=True)
class Demo:
    """The folder and the settings that all parts of the demonstration share."""

    root: Path
    steps: int
    """Optimizer steps of each run."""

    @property
    def overrides(self) -> list[str]:
        """Overrides of the recipe that both runs share."""
        return [f"runs_dir={self.root}", f"data.sources.0.path={self.root / 'data'}", f"train.steps={self.steps}"]

    @property
    def recipe(self) -> str:
        """Path of the recipe."""
        return str(files("recipes") / "laptop.yaml")

    def run_folder(self, name: str) -> RunFolder:
        """Return the folder of the run `killed` or `uninterrupted`."""
        return RunFolder(self.root / name)


def run_demo(demo: Demo) -> bool:
    """Run all parts; return whether the two runs are equal bit for bit. LaunchError if a part fails."""
    demo.root.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    say(f"1. A corpus: the sources and docstrings of Python {sys.version.split()[0]}'s standard library")
    documents, text_bytes = gather(demo.root / "corpus.jsonl", CORPUS_BYTES)
    print(f"{documents:,} documents, {size(text_bytes)} in {demo.root / 'corpus.jsonl'}")

    say("2. A tokenizer and a data set")
    build_data(demo)

    say(f"3. Train a small GPT on {RANKS} ranks; one of them will be killed")
    killed = train_and_kill(demo)

    say("4. The same steps without interruption")
    keepstep("run", demo.recipe, "--ranks", str(RANKS), "name=uninterrupted", *demo.overrides)

    say("5. Compare the two runs")
    equal = compare(demo)

    say("6. Export to Hugging Face, reload, compare, and continue a prompt")
    keepstep("export", str(demo.root / "killed"), "--out", str(demo.root / "exported"), "--check")
    keepstep("generate", str(demo.root / "killed"), "--prompt", PROMPT, "--tokens", "80")

    summarize(demo, killed, equal, time.perf_counter() - started)
    return equal


def build_data(demo: Demo) -> None:
    """Train a tokenizer and build a data set with the commands of `keepstep data`."""
    corpus, tokenizer, data = (str(demo.root / name) for name in ("corpus.jsonl", "tokenizer", "data"))
    keepstep("data", "tokenizer", corpus, "--out", tokenizer, "--vocab-size", str(VOCAB_SIZE))
    options = ["--tokenizer", tokenizer, "--seq-len", str(SEQ_LEN), "--deduplicate", "--validation-share", "0.02"]
    keepstep("data", "build", corpus, "--out", data, *options)


@dataclass(frozen=True)
class Kill:
    """The kill of a rank, and its cost."""

    rank: int
    step: int
    """Last step before the kill."""
    resumed_step: int
    """Step of the checkpoint that the run resumed from."""
    seconds: float
    """From the kill to the end of the next step."""


def train_and_kill(demo: Demo) -> Kill:
    """Train, kill a rank with SIGKILL between a third and two thirds of the run, and wait for the end."""
    folder = demo.run_folder("killed")
    goal = random.randint(demo.steps // 3, 2 * demo.steps // 3)
    process = start("run", demo.recipe, "--ranks", str(RANKS), "name=killed", *demo.overrides)
    while last_step(folder) < goal and process.poll() is None:
        time.sleep(0.05)
    time.sleep(random.random())
    if process.poll() is not None:
        raise LaunchError(f"the run ended with exit code {process.returncode} before the kill; see its output above")
    rank, victim = random.choice(ranks_of(process.pid))
    step, moment = last_step(folder), time.time()
    victim.kill()
    print(f"\n>>> killed rank {rank} (pid {victim.pid}) with SIGKILL after step {step}\n", flush=True)
    if process.wait() != 0:
        raise LaunchError(f"the killed run did not resume; see its log in {folder.logs}")
    resumed = [event for event in read_jsonl(folder.events) if event["kind"] == "resumed"][-1]
    next_step = next(record["time"] for record in loss_records(folder) if record["time"] > resumed["time"])
    return Kill(rank, step, resumed["step"], next_step - moment)


def ranks_of(pid: int) -> list[tuple[int, psutil.Process]]:
    """Return number and process of each rank below a launcher."""
    below = psutil.Process(pid).children(recursive=True)
    found = [(process, process.environ().get("RANK")) for process in below if "train" in process.cmdline()]
    return [(int(rank), process) for process, rank in found if rank is not None]


def loss_records(folder: RunFolder) -> list[dict[str, float]]:
    """Return the records of training steps, in the order in which they were written."""
    return [record for record in read_jsonl(folder.metrics) if "loss" in record]


def last_step(folder: RunFolder) -> int:
    """Return the highest step in metrics.jsonl, or 0."""
    return int(max((record["step"] for record in loss_records(folder)), default=0))


def compare(demo: Demo) -> bool:
    """Return whether every step's loss and the last weights are equal bit for bit."""
    folders = [demo.run_folder(name) for name in ("killed", "uninterrupted")]
    one, two = ({record["step"]: record["loss"] for record in loss_records(folder)} for folder in folders)
    different = [step for step in range(1, demo.steps + 1) if one.get(step) != two.get(step)]
    print(f"losses of {demo.steps} steps: " + ("equal bit for bit" if not different else f"differ at {different}"))
    checkpoints = [str(folder.checkpoints / step_name(demo.steps)) for folder in folders]
    return keepstep("checkpoint", "diff", *checkpoints, check=False) == 0 and not different


def summarize(demo: Demo, kill: Kill, equal: bool, seconds: float) -> None:
    """Print what happened, and commands to try next."""
    records = loss_records(demo.run_folder("uninterrupted"))
    speed = sorted(record["tokens_per_second"] for record in records)[len(records) // 2]
    say(f"Done in {duration(seconds)}")
    repeated = f"{kill.step - kill.resumed_step} steps repeated, {kill.seconds:.1f} s to the next step"
    print_facts(
        [
            ("loss", f"{records[0]['loss']:.3f} at step 1, {records[-1]['loss']:.3f} at step {demo.steps}"),
            ("speed", f"{speed:,.0f} tokens/s (median)"),
            ("kill", f"rank {kill.rank} after step {kill.step}; resumed from step {kill.resumed_step}: {repeated}"),
            (
                "result",
                "the same as without the kill, bit for bit" if equal else "DIFFERENT from the run without it",
            ),
            ("data set", str(demo.root / "data")),
            ("runs", f"{demo.root}/killed, {demo.root}/uninterrupted"),
            ("Hugging Face", str(demo.root / "exported")),
        ],
        indent=0,
    )
    print(
        "\nTry next:\n"
        f"  .venv/bin/keepstep report {demo.root / 'killed'} {demo.root / 'uninterrupted'}\n"
        f"  .venv/bin/keepstep status {demo.root / 'killed'}\n"
        f"  .venv/bin/keepstep generate {demo.root / 'killed'} --prompt 'class '\n"
        f"  .venv/bin/keepstep run recipes/laptop.yaml --ranks 2 {' '.join(demo.overrides[:2])} "
        "name=longer train.steps=1000"
    )


def say(title: str) -> None:
    """Print the title of a part."""
    print(f"\n== {title}", flush=True)


def keepstep(*argv: str, check: bool = True) -> int:
    """Run a keepstep command and return its exit code. LaunchError if `check` and it fails."""
    code = start(*argv).wait()
    if check and code != 0:
        raise LaunchError(f"`keepstep {' '.join(argv)}` ended with exit code {code}; see its output above")
    return code


def start(*argv: str) -> subprocess.Popen[bytes]:
    """Print a keepstep command as a user would type it, and start it."""
    print(f"$ keepstep {' '.join(json.dumps(word) if ' ' in word else word for word in argv)}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "launch.cli", *argv])
