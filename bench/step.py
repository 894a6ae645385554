"""Times a training step of Keepstep and of other systems on one machine: `python -m bench.step --help`.

All contenders stay loaded and take turns: in each round, each runs a few steps. So other load on the machine affects
all of them alike. Ratios are taken within a round; the table shows their medians and ranges over rounds. The other
systems run in a separate environment (`--peers`, a Python with litgpt, transformers, accelerate and deepspeed).
"""

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path

import torch

from bench.contender import Contender
from train.model.config import ModelConfig
from train.model.flops import flops_per_token, measure_matmul_peak

MODELS = {
    "14M": {"vocab_size": 8192, "seq_len": 512, "n_layers": 6, "n_heads": 6, "d_model": 384, "d_ff": 1024},
    "124M": {"vocab_size": 50304, "seq_len": 1024, "n_layers": 12, "n_heads": 12, "d_model": 768, "d_ff": 2048},
}
MICRO_BATCH = {"14M": 8, "124M": 1}
PEERS = ("nanogpt", "litgpt", "transformers", "deepspeed")
LIMIT = "matmuls alone"
GLOO = "gloo alone"
ONE_PROCESS = "keepstep single, compiled, one process"
KEEP_ALL = "activations kept"


def contenders(peers_python: str, names: list[str], n_ranks: int, model: str = "14M") -> list[Contender]:
    """All contenders in their fastest documented settings, after the bounds of their speed.

    `names`: keep only those whose name starts with one of these; empty keeps all."""
    both_ways = n_ranks == 1 and model == "14M"  # eager and compiled; otherwise they would not fit in memory together
    ours, others = sys.executable, peers_python
    single = {"engine": "single"}
    if n_ranks == 1:
        bounds = [Contender(LIMIT, "matmuls_alone.py", ours)]
        engines = ["single"]
    else:
        bounds = [
            Contender(GLOO, "gloo_alone.py", ours, processes=n_ranks),
            Contender(ONE_PROCESS, "keepstep_engine.py", ours, compile=True, options=single),
        ]
        engines = ["ddp", "fsdp2"]
    programs = [
        *((f"keepstep {engine}", "keepstep_engine.py", ours, {"engine": engine}, (False, True)) for engine in engines),
        ("nanogpt", "nanogpt_like.py", ours, {}, (False, True)),
        ("litgpt", "litgpt_loop.py", others, {}, (True, False)),
        ("transformers", "transformers_trainer.py", others, {}, (False, True)),
        ("deepspeed", "deepspeed_engine.py", others, {}, (False,)),
    ]
    every = [
        *bounds,
        *(
            Contender(f"{name}{', compiled' * compiled}", program, python, compiled, n_ranks, options)
            for name, program, python, options, ways in programs
            for compiled in (ways if both_ways else ways[-1:])  # the faster one is last
        ),
    ]
    return [one for one in every if not names or any(one.name.startswith(name) for name in names)]


def recomputing() -> list[Contender]:
    """Ways to hold fewer activations, in one process."""
    ways: dict[str, dict[str, str]] = {
        KEEP_ALL: {},
        "full": {"activation_checkpointing": "full"},
        "full, every second block": {"activation_checkpointing": "full", "checkpoint_every_k_blocks": "2"},
        "selective": {"activation_checkpointing": "selective"},
        "compiled": {"compile": "true"},
        "compiled, budget 0.5": {"compile": "true", "activation_memory_budget": "0.5"},
        "compiled, budget 0.25": {"compile": "true", "activation_memory_budget": "0.25"},
    }
    return [
        Contender(name, "keepstep_engine.py", sys.executable, options={"engine": "single", **way})
        for name, way in ways.items()
    ]


def measure(
    entrants: list[Contender], settings: dict[str, int], rounds: int, steps: int, start_limit: float = 600.0
) -> None:
    """Start the contenders and run the rounds. A contender that fails keeps no rounds and says why in `failure`."""
    ready = []
    for index, one in enumerate(entrants):
        try:
            one.launch(settings, 29700 + index, start_limit)
            one.run(1)  # warm-up
            one.rounds.clear()
            one.processor.clear()
            ready.append(one)
            print(f"{one.name}: first step after {one.first_step_seconds:.1f} s", file=sys.stderr, flush=True)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
    for _ in range(rounds):
        for one in [one for one in ready if not one.failure]:
            try:
                one.run(steps)
            except RuntimeError as error:
                one.rounds.clear()
                print(error, file=sys.stderr, flush=True)
    for one in ready:
        if not one.failure:
            one.stop()


def table(entrants: list[Contender], settings: dict[str, int], peak_flops: float) -> list[str]:
    """Lines of a Markdown table. Ratios are medians of ratios within rounds, with their smallest and largest value."""
    model = ModelConfig(**{name: value for name, value in settings.items() if name != "micro_batch_size"})  # pyright: ignore[reportArgumentType]
    sequence_tokens = settings["micro_batch_size"] * settings["seq_len"]
    measured = [one for one in entrants if one.rounds]
    peers = [one for one in measured if one.name.startswith(PEERS)]
    best = min(peers, key=lambda one: statistics.median(one.rounds), default=None)
    bound = next((one for one in measured if one.name in (LIMIT, ONE_PROCESS, KEEP_ALL)), None)
    head = (
        "contender",
        "tokens/s (range)",
        "model GFLOP/s",
        "MFU (measured peak)",
        "processor s per step",
        f"speed relative to {bound.name if bound else 'the bound'}",
        f"relative to {best.name if best else 'the best peer'} (range)",
        "peak GiB per rank",
        "seconds until ready",
        "seconds to the first step",
    )
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for one in measured:
        tokens = one.processes * sequence_tokens
        speeds = sorted(tokens / seconds for seconds in one.rounds)
        speed = statistics.median(speeds)
        flops = flops_per_token(model) * speed
        trains = one.name not in (LIMIT, GLOO)
        cells = (
            one.name,
            f"{speed:,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})",
            f"{flops / 1e9:,.0f}" if trains else "-",
            f"{flops / peak_flops:.0%}" if trains else "-",
            f"{statistics.median(one.processor):.2f}",
            f"{_ratio(bound, one)[1]:.2f}" if bound is not None else "-",
            "{1:.2f} ({0:.2f} to {2:.2f})".format(*_ratio(best, one)) if best is not None and trains else "-",
            f"{one.peak_gib:.2f}",
            f"{one.ready_seconds:.1f}",
            f"{one.first_step_seconds:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    failed = [f"{one.name} ({one.failure})" for one in entrants if not one.rounds]
    if failed:
        lines.append(f"\nDid not run: {', '.join(failed)}.")
    return lines


def _ratio(slow: Contender, fast: Contender) -> tuple[float, float, float]:
    """Speed of the second relative to the first, in tokens: smallest, median and largest over rounds."""
    size = fast.processes / slow.processes
    ratios = sorted(size * a / b for a, b in zip(slow.rounds, fast.rounds, strict=True))
    return ratios[0], statistics.median(ratios), ratios[-1]


def machine() -> str:
    """Processors, their matrix instructions, operating system and torch of this machine, as one line."""
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    supported = {
        "AMX": torch.cpu._is_amx_tile_supported(),
        "AVX-512 with bf16": torch.cpu._is_avx512_bf16_supported(),
        "AVX-512": torch.cpu._is_avx512_supported(),
        "AVX2": torch.cpu._is_avx2_supported(),
    }
    kind = next((name for name, is_supported in supported.items() if is_supported), "no wide vectors")
    return f"{len(names)} x {names[0]} ({kind}), {platform.system()}, torch {torch.__version__}"


def main() -> None:
    """Time the contenders that the command line names and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="14M")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, help="default: 8 for 14M, 1 for 124M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in a round")
    parser.add_argument("--start-limit", type=float, default=100.0, help="seconds to a contender's first step")
    parser.add_argument("--peers", default=sys.executable, help="the Python of the peers' environment")
    parser.add_argument("--recomputation", action="store_true", help="compare ways to hold fewer activations instead")
    parser.add_argument("--only", nargs="*", default=[], help="only contenders whose names begin with one of these")
    parser.add_argument("--json", type=Path, help="file to append the raw rounds to, one line per contender")
    options = parser.parse_args()
    micro_batch_size = options.micro_batch_size or MICRO_BATCH[options.model]
    settings = {**MODELS[options.model], "micro_batch_size": micro_batch_size}
    if options.recomputation:
        entrants = recomputing()
    else:
        entrants = contenders(options.peers, options.only, options.ranks, options.model)
    peak_flops = measure_matmul_peak(torch.device("cpu"), torch.bfloat16, seconds=1.0)
    measure(entrants, settings, options.rounds, options.steps, options.start_limit)
    size = f"micro batch {micro_batch_size} x {settings['seq_len']}"
    load = f"load average {os.getloadavg()[1]:.1f} over the last 5 minutes"
    peak = f"matmul peak {peak_flops / 1e9:.0f} GFLOP/s"
    print(f"### {options.model}, {options.ranks} rank{'s' * (options.ranks > 1)}, bf16, {size}\n")
    print(f"{machine()}; {peak}; {options.rounds} rounds of {options.steps} steps in turn; {load}\n")
    print("\n".join(table(entrants, settings, peak_flops)))
    if options.json:
        with options.json.open("a", encoding="utf-8") as file:
            for one in entrants:
                record = {"model": options.model, "ranks": options.ranks, "name": one.name, "rounds": one.rounds}
                file.write(json.dumps({**record, "processor": one.processor, "peak_gib": one.peak_gib}) + "\n")


if __name__ == "__main__":
    main()
