"""Time a training step of Keepstep and of its peers, side by side on one machine: `python -m bench.step --help`.

All contenders stay loaded and take turns, a few steps each, round after round, so that whatever else the machine does
hits all alike; ratios are taken within a round, and medians over rounds, with their range. Peers run in an environment
of their own (`--peers`, a Python with litgpt, transformers, accelerate and deepspeed).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from bench.peers.protocol import Spec
from train.config import ModelConfig
from train.flops import flops_per_token

HERE = Path(__file__).parent
MODELS = {
    "14M": {"vocab_size": 8192, "seq_len": 512, "n_layers": 6, "n_heads": 6, "d_model": 384, "d_ff": 1024},
    "124M": {"vocab_size": 50304, "seq_len": 1024, "n_layers": 12, "n_heads": 12, "d_model": 768, "d_ff": 2048},
}
PEERS = ("nanogpt", "litgpt", "transformers", "deepspeed")
LIMIT = "matmuls alone"


@dataclass
class Contender:
    name: str
    program: str
    compile: bool
    python: str
    options: dict[str, str] = field(default_factory=dict)
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)
    first_step_seconds: float = 0.0
    peak_gib: float = 0.0
    rounds: list[float] = field(default_factory=list)
    """Median seconds of a step, by round."""
    processor: list[float] = field(default_factory=list)

    def launch(self, settings: dict[str, int], n_ranks: int, port: int) -> None:
        """Start its ranks and wait for the first step."""
        threads = max(1, (os.cpu_count() or 1) // n_ranks)
        spec = Spec(**settings, threads=threads, compile=self.compile, options=self.options, started=time.time())  # pyright: ignore[reportArgumentType]
        for rank in range(n_ranks):
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE.parent)}
            environment["OMP_WAIT_POLICY"] = "passive"  # the loaded ones that wait must not spin
            if n_ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks)}
                environment |= {"LOCAL_WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [self.python, str(HERE / "peers" / self.program), json.dumps(asdict(spec))]
            log = Path(f"/tmp/keepstep-bench-{self.program}-{rank}.log")
            pipe = subprocess.PIPE
            with log.open("w", encoding="utf-8") as errors:
                self.ranks.append(
                    subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True)
                )
        self.first_step_seconds = max(self._hear(rank)["first_step_seconds"] for rank in self.ranks)

    def run(self, steps: int) -> None:
        """One round. Collective among its ranks."""
        for rank in self.ranks:
            assert rank.stdin is not None
            print(steps, file=rank.stdin, flush=True)
        told = [self._hear(rank) for rank in self.ranks]
        self.rounds.append(statistics.median(told[0]["clock"]))
        self.processor.append(sum(statistics.median(record["processor"]) for record in told))
        self.peak_gib = max(record["peak_gib"] for record in told)

    def _hear(self, rank: subprocess.Popen[str]) -> dict:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("BENCH "):
                return json.loads(line.removeprefix("BENCH "))
        raise RuntimeError(f"{self.name} ended early; see /tmp/keepstep-bench-{self.program}-*.log")

    def stop(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
            rank.wait(timeout=60)


def contenders(peers_python: str, names: list[str], n_ranks: int) -> list[Contender]:
    """Each at its documented best; the limit first."""
    engines = ["single"] if n_ranks == 1 else ["ddp", "fsdp2"]
    ours = [
        Contender(
            f"keepstep {engine}{', compiled' * compiled}",
            "keepstep_engine.py",
            compiled,
            sys.executable,
            {"engine": engine},
        )
        for engine in engines
        for compiled in (False, True)
    ]
    every = [
        Contender(LIMIT, "matmuls_alone.py", False, sys.executable),
        *ours,
        Contender("nanogpt, compiled", "nanogpt_like.py", True, sys.executable),
        Contender("litgpt", "litgpt_loop.py", False, peers_python),
        Contender("litgpt, compiled", "litgpt_loop.py", True, peers_python),
        Contender("transformers", "transformers_trainer.py", False, peers_python),
        Contender("transformers, compiled", "transformers_trainer.py", True, peers_python),
        Contender("deepspeed", "deepspeed_engine.py", False, peers_python),
    ]
    if n_ranks > 1:
        every = every[1:]
    return [one for one in every if not names or any(one.name.startswith(name) for name in names)]


def measure(entrants: list[Contender], settings: dict[str, int], n_ranks: int, rounds: int, steps: int) -> None:
    ready = []
    for index, one in enumerate(entrants):
        try:
            one.launch(settings, n_ranks, 29700 + index)
            one.run(1)  # warm-up
            one.rounds.clear()
            one.processor.clear()
            ready.append(one)
            print(f"{one.name}: first step after {one.first_step_seconds:.1f} s", file=sys.stderr, flush=True)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
    for _ in range(rounds):
        for one in ready:
            one.run(steps)
    for one in ready:
        one.stop()


def table(entrants: list[Contender], settings: dict[str, int], n_ranks: int) -> list[str]:
    """Markdown. Ratios are medians of ratios within rounds, with the least and the greatest."""
    tokens = settings["micro_batch_size"] * settings["seq_len"] * n_ranks
    model = ModelConfig(**{name: value for name, value in settings.items() if name != "micro_batch_size"})  # pyright: ignore[reportArgumentType]
    flops = flops_per_token(model) * tokens
    measured = [one for one in entrants if one.rounds]
    peers = [one for one in measured if one.name.startswith(PEERS)]
    best = min(peers, key=lambda one: statistics.median(one.rounds), default=None)
    limit = next((one for one in measured if one.name == LIMIT), None)
    head = (
        "contender",
        "tokens/s (range)",
        "model GFLOP/s",
        "processor s a step",
        "of the products' speed",
        "by the best peer (range)",
        "peak GiB a rank",
        "command to first step, s",
    )
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for one in measured:
        speeds = sorted(tokens / seconds for seconds in one.rounds)
        speed = statistics.median(speeds)
        share = f"{_ratio(limit, one)[1]:.0%}" if limit is not None else "-"
        ratio = "-"
        if best is not None and one is not limit:
            least, middle, greatest = _ratio(best, one)
            ratio = f"{middle:.2f} ({least:.2f} to {greatest:.2f})"
        cells = (
            one.name,
            f"{speed:,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})",
            f"{flops * speed / tokens / 1e9:,.0f}",
            f"{statistics.median(one.processor):.2f}",
            share,
            ratio,
            f"{one.peak_gib:.2f}",
            f"{one.first_step_seconds:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    failed = [one.name for one in entrants if not one.rounds]
    if failed:
        lines.append(f"\nDid not run: {', '.join(failed)}.")
    return lines


def _ratio(slow: Contender, fast: Contender) -> tuple[float, float, float]:
    """How many times as fast the second is: least, median, greatest over rounds."""
    ratios = sorted(a / b for a, b in zip(slow.rounds, fast.rounds, strict=True))
    return ratios[0], statistics.median(ratios), ratios[-1]


def machine() -> str:
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{len(names)} x {names[0]}, {platform.system()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="14M")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each contender in a round")
    parser.add_argument("--peers", default=sys.executable, help="the Python of the peers' environment")
    parser.add_argument("--only", nargs="*", default=[], help="contenders whose names start so")
    parser.add_argument("--json", type=Path, help="where to append the raw rounds, a line a contender")
    options = parser.parse_args()
    settings = {**MODELS[options.model], "micro_batch_size": options.micro_batch_size}
    entrants = contenders(options.peers, options.only, options.ranks)
    measure(entrants, settings, options.ranks, options.rounds, options.steps)
    size = f"micro batch {options.micro_batch_size} x {settings['seq_len']}"
    load = f"load average {os.getloadavg()[1]:.1f} over the last 5 minutes"
    print(f"### {options.model}, {options.ranks} rank{'s' * (options.ranks > 1)}, bf16, {size}\n")
    print(f"{machine()}; {options.rounds} rounds of {options.steps} steps in turn; {load}\n")
    print("\n".join(table(entrants, settings, options.ranks)))
    if options.json:
        with options.json.open("a", encoding="utf-8") as file:
            for one in entrants:
                record = {"model": options.model, "ranks": options.ranks, "name": one.name, "rounds": one.rounds}
                file.write(json.dumps({**record, "processor": one.processor, "peak_gib": one.peak_gib}) + "\n")


if __name__ == "__main__":
    main()
