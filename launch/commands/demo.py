"""`keepstep demo`: the whole system on this machine in minutes, by the commands that a user will keep using.

It gathers a corpus, builds a data set, trains a small GPT over two ranks, has one of them killed, lets the run resume
by itself, trains the same steps without interruption, compares, exports, and continues a prompt.
"""

import argparse
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
from parallel.errors import LaunchError
from train.records.events import read_jsonl

RANKS = 2
VOCAB_SIZE = 4096
SEQ_LEN = 256
CORPUS_BYTES = 12_000_000
PROMPT = "def "


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, help="where everything goes (default: a new folder runs/demo-DATE-TIME)")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default 120)")


@dataclass(frozen=True)
class Demo:
    """Paths and settings that its parts share."""

    root: Path
    steps: int

    @property
    def overrides(self) -> list[str]:
        return [f"runs_dir={self.root}", f"data.sources.0.path={self.root / 'data'}", f"train.steps={self.steps}"]

    @property
    def recipe(self) -> str:
        return str(files("recipes") / "laptop.yaml")


def run(options: argparse.Namespace) -> int:
    if options.steps < 60:
        raise LaunchError(f"--steps ({options.steps}) must be at least 60: a checkpoint must come before the kill")
    demo = Demo(options.dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"), options.steps)
    if demo.root.exists() and any(demo.root.iterdir()):
        raise LaunchError(f"--dir ({demo.root}) is not empty; name a new folder")
    demo.root.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    say(f"1. A corpus: the sources and docstrings of Python {sys.version.split()[0]}'s standard library")
    documents, size = gather(demo.root / "corpus.jsonl", CORPUS_BYTES)
    print(f"{documents} documents, {size / 1e6:.1f} MB in {demo.root / 'corpus.jsonl'}")

    say("2. A tokenizer and a data set")
    build_data(demo)

    say(f"3. Train a small GPT over {RANKS} ranks; one of them will be killed")
    killed = train_and_kill(demo)

    say("4. The same steps without interruption")
    keepstep("run", demo.recipe, "--ranks", str(RANKS), "name=uninterrupted", *demo.overrides)

    say("5. Compare the two runs")
    equal = compare(demo)

    say("6. Export to Hugging Face, reload, compare, and continue a prompt")
    keepstep("export", str(demo.root / "killed"), "--out", str(demo.root / "exported"), "--check")
    keepstep("generate", str(demo.root / "killed"), "--prompt", PROMPT, "--tokens", "80")

    summarize(demo, killed, equal, time.perf_counter() - started)
    return 0 if equal else 1


def build_data(demo: Demo) -> None:
    corpus, tokenizer, data = (str(demo.root / name) for name in ("corpus.jsonl", "tokenizer", "data"))
    keepstep("data", "tokenizer", corpus, "--out", tokenizer, "--vocab-size", str(VOCAB_SIZE))
    keepstep(
        "data",
        "build",
        corpus,
        "--out",
        data,
        "--tokenizer",
        tokenizer,
        "--seq-len",
        str(SEQ_LEN),
        "--deduplicate",
        "--validation-share",
        "0.02",
    )


@dataclass(frozen=True)
class Killed:
    """What the kill hit and cost."""

    rank: int
    step: int
    resumed_step: int
    seconds: float
    """From the kill to the first step that is finished again."""


def train_and_kill(demo: Demo) -> Killed:
    """Train; SIGKILL a rank at a moment between a third and two thirds of the run; wait for the end."""
    argv = ["run", demo.recipe, "--ranks", str(RANKS), "name=killed", *demo.overrides]
    metrics = demo.root / "killed" / "metrics.jsonl"
    goal = random.randint(demo.steps // 3, 2 * demo.steps // 3)
    process = start(*argv)
    while last_step(metrics) < goal and process.poll() is None:
        time.sleep(0.05)
    time.sleep(random.random())
    if process.poll() is not None:
        raise LaunchError(f"the run ended by itself with exit code {process.returncode}; what it said stands above")
    rank, victim = random.choice(ranks_of(process.pid))
    step, moment = last_step(metrics), time.time()
    victim.kill()
    print(f"\n>>> killed rank {rank} (pid {victim.pid}) with SIGKILL after step {step}\n", flush=True)
    if process.wait() != 0:
        raise LaunchError(f"the killed run did not come back; its log is in {demo.root / 'killed' / 'logs'}")
    events = [event for event in read_jsonl(demo.root / "killed" / "events.jsonl") if event["kind"] == "resumed"]
    back = next(record["time"] for record in losses_in_order(metrics) if record["time"] > events[-1]["time"])
    return Killed(rank, step, events[-1]["step"], back - moment)


def ranks_of(pid: int) -> list[tuple[int, psutil.Process]]:
    """The rank processes below a launcher, with their numbers."""
    below = psutil.Process(pid).children(recursive=True)
    found = [(process, process.environ().get("RANK")) for process in below if "train" in process.cmdline()]
    return [(int(rank), process) for process, rank in found if rank is not None]


def losses_in_order(metrics: Path) -> list[dict[str, float]]:
    return [record for record in read_jsonl(metrics) if "loss" in record]


def last_step(metrics: Path) -> int:
    return int(max((record["step"] for record in losses_in_order(metrics)), default=0))


def compare(demo: Demo) -> bool:
    """Whether every step's loss and the last weights are equal bit for bit."""
    curves = [
        {record["step"]: record["loss"] for record in losses_in_order(demo.root / name / "metrics.jsonl")}
        for name in ("killed", "uninterrupted")
    ]
    different = [step for step in range(1, demo.steps + 1) if curves[0].get(step) != curves[1].get(step)]
    print(f"losses of {demo.steps} steps: " + ("equal bit for bit" if not different else f"differ at {different}"))
    last = f"checkpoints/step-{demo.steps:08d}"
    folders = [str(demo.root / name / last) for name in ("killed", "uninterrupted")]
    return keepstep("checkpoint", "diff", *folders, check=False) == 0 and not different


def summarize(demo: Demo, killed: Killed, equal: bool, seconds: float) -> None:
    records = losses_in_order(demo.root / "uninterrupted" / "metrics.jsonl")
    speed = sorted(record["tokens_per_second"] for record in records)[len(records) // 2]
    say(f"Done in {seconds:.0f} s")
    outcome = "the same as without the kill, bit for bit" if equal else "DIFFERENT from the run without it"
    print(
        f"loss           {records[0]['loss']:.3f} at step 1, {records[-1]['loss']:.3f} at step {demo.steps}\n"
        f"speed          {speed:,.0f} tokens/s (median)\n"
        f"the kill       rank {killed.rank} after step {killed.step}; resumed from step {killed.resumed_step}: "
        f"{killed.step - killed.resumed_step} steps done again, {killed.seconds:.1f} s to the next step\n"
        f"the outcome    {outcome}\n"
        f"data set       {demo.root / 'data'}\n"
        f"runs           {demo.root}/killed, {demo.root}/uninterrupted\n"
        f"Hugging Face   {demo.root / 'exported'}\n\n"
        "Try next:\n"
        f"  .venv/bin/tensorboard --logdir {demo.root}\n"
        f"  .venv/bin/keepstep generate {demo.root / 'killed'} --prompt 'class '\n"
        f"  .venv/bin/keepstep run recipes/laptop.yaml --ranks 2 {' '.join(demo.overrides[:2])} "
        "name=longer train.steps=1000"
    )


def say(title: str) -> None:
    print(f"\n== {title}", flush=True)


def keepstep(*argv: str, check: bool = True) -> int:
    """Run one of our own commands, shown as a user would type it."""
    code = start(*argv).wait()
    if check and code != 0:
        raise LaunchError(f"`keepstep {' '.join(argv)}` ended with exit code {code}")
    return code


def start(*argv: str) -> subprocess.Popen[bytes]:
    print(f"$ keepstep {' '.join(json.dumps(word) if ' ' in word else word for word in argv)}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "launch.cli", *argv])
