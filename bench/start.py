"""Times the start of a training, from the command to the first step: `python -m bench.start [--peers PYTHON]`.

No start can avoid importing torch and building the model. For Keepstep the time covers the whole product, `python -m
train` with data, checkpoints, lease and watchdog, until its loop asks for the first batch. For the contenders of
`bench.step` it covers the time until model and optimizer are built. All take turns; ratios are taken within a round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench.contender import HERE, Contender
from bench.peers.protocol import Spec
from bench.step import MICRO_BATCH, MODELS, machine
from launch.corpus import gather

MODEL = "14M"
MINIMUM = "torch and the model"
BUILD = (
    "import json, os, sys, nanogpt_like as n\n"
    "n.torch.set_num_threads(2); n.Plain(n.Spec(**json.loads(sys.argv[1]))); os._exit(0)"
)


def minimum(settings: dict[str, int]) -> float:
    """Seconds to import torch and build the model."""
    spec = Spec(**settings, threads=2, compile=False, options={}, started=0.0)  # pyright: ignore[reportArgumentType]
    began = time.monotonic()
    command = [sys.executable, "-c", BUILD, json.dumps(asdict(spec))]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(HERE / "peers")}, check=True)
    return time.monotonic() - began


def keepstep(settings: dict[str, int], engine: str, folder: Path) -> float:
    """Seconds from the command until Keepstep, on one rank, asks for its first batch."""
    out = Path(tempfile.mkdtemp(dir=folder))
    model = {name: value for name, value in settings.items() if name != "micro_batch_size"}
    size = settings["micro_batch_size"]
    recipe = {
        "name": "start",
        "runs_dir": str(out),
        "model": model,
        "data": {"sources": [{"path": str(folder / "data")}]},
        "optim": {"lr": 1e-3, "warmup_steps": 0},
        "train": {"steps": 1, "global_batch_size": size, "micro_batch_size": size, "eval_sequences": 0},
        "parallel": {"engine": engine, "precision": "bf16", "device": "cpu"},
    }
    (out / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29691"}
    metrics = out / "start" / "metrics.jsonl"
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "train", str(out / "recipe.json")],
        env=os.environ | alone | rendezvous,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                assert process.stderr is not None
                raise SystemExit(process.stderr.read())
            time.sleep(0.002)
        taken = time.monotonic() - began
    with metrics.open(encoding="utf-8") as lines:
        first_step = json.loads(next(lines))["seconds"]
    return taken - first_step["data_wait"] - first_step["step"]


def peer(contender: Contender, settings: dict[str, int]) -> float:
    """Seconds from the command until a contender has built model and optimizer."""
    contender.ranks.clear()
    contender.launch(settings, 29692, 200.0)
    contender.stop()
    return contender.ready_seconds


def prepare(folder: Path, seq_len: int) -> None:
    """Build a small data set in the folder."""
    corpus, tokenizer = str(folder / "corpus.jsonl"), str(folder / "tokenizer")
    gather(Path(corpus), 1_000_000)
    for arguments in (
        ["tokenizer", corpus, "--out", tokenizer, "--vocab-size", "1024"],
        ["build", corpus, "--out", str(folder / "data"), "--tokenizer", tokenizer, "--seq-len", str(seq_len)],
    ):
        subprocess.run([sys.executable, "-m", "launch.cli", "data", *arguments], check=True, capture_output=True)


def main() -> None:
    """Time all starts and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, help="the Python of the peers' environment")
    parser.add_argument("--only", nargs="*", default=[], help="only starts whose names begin with one of these")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    settings = {**MODELS[MODEL], "micro_batch_size": MICRO_BATCH[MODEL]}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), settings["seq_len"])
        starts: dict[str, Callable[[], float]] = {MINIMUM: partial(minimum, settings)}
        for engine in ("single", "ddp", "fsdp2"):
            starts[f"keepstep {engine}"] = partial(keepstep, settings, engine, Path(folder))
        for name, program, python in (
            ("nanogpt", "nanogpt_like.py", sys.executable),
            ("litgpt", "litgpt_loop.py", options.peers),
            ("transformers", "transformers_trainer.py", options.peers),
            ("deepspeed", "deepspeed_engine.py", options.peers),
        ):
            starts[name] = partial(peer, Contender(name, program, python), settings)
        taken: dict[str, list[float]] = {
            name: [] for name in starts if name == MINIMUM or not options.only or name.startswith(tuple(options.only))
        }
        for _ in range(options.rounds):
            for name, seconds in taken.items():
                seconds.append(starts[name]())
    print(f"{machine()}; {MODEL}; {options.rounds} rounds in turn; load average {os.getloadavg()[1]:.1f}\n")
    print(f"| start | seconds to the first step (range) | relative to {MINIMUM} (range) |\n| --- | --- | --- |")
    for name, seconds in taken.items():
        ratios = sorted(one / bound for one, bound in zip(seconds, taken[MINIMUM], strict=True))
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {name} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {ratio} |")


if __name__ == "__main__":
    main()
