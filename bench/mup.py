"""Measures that muP keeps the best learning rate where it is over widths: `python -m bench.mup`.

Small models of several widths train on the bytes of Python's standard library, with each learning rate of a grid, in
the standard parametrization and with muP. The table shows the last losses. Takes some minutes on one core.

Shapes: B rows, T sequence.
"""

import argparse
import math
import sysconfig
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from parallel.engines.initial import fill_model
from train.model.config import ModelConfig, MupConfig
from train.model.gpt import GPT, initial_value
from train.optim.config import OptimConfig
from train.optim.groups import build_optimizer
from train.optim.schedule import learning_rate

WIDTHS = (32, 64, 128)
EXPONENTS = range(-9, -3)
"""Learning rates are these powers of 2."""
ROWS, LENGTH, HEAD = 8, 64, 16
INIT_STD = 0.08
"""About half of 1 / sqrt(32), as 0.02 is at a width of 600."""
TAIL = 10
"""Steps over which the last loss is averaged."""


def corpus() -> Tensor:
    """The bytes of some modules of the standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def last_loss(data: Tensor, width: int, lr: float, base_width: int | None, steps: int, seed: int) -> float:
    """The training loss of the last steps in nats per byte; infinite if training diverged."""
    mup = None if base_width is None else MupConfig(base_width=base_width)
    model_config = ModelConfig(
        vocab_size=256,
        seq_len=LENGTH,
        n_layers=2,
        n_heads=width // HEAD,
        d_model=width,
        d_ff=4 * width,
        init_std=INIT_STD,
        mup=mup,
    )
    model = GPT(model_config)
    fill_model(model, partial(initial_value, config=model_config, seed=seed))
    config = OptimConfig(lr=lr, warmup_steps=steps // 10)
    optimizer = build_optimizer(model, config)
    optimizer.create_state()
    generator = torch.Generator().manual_seed(seed)
    positions_BT = torch.arange(LENGTH).expand(ROWS, LENGTH)
    documents_BT = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    losses: list[float] = []
    for step in range(1, steps + 1):
        starts = torch.randint(0, len(data) - LENGTH - 1, (ROWS,), generator=generator)
        rows = data[starts[:, None] + torch.arange(LENGTH + 1)]
        loss = model(rows[:, :-1], positions_BT, documents_BT, rows[:, 1:]).sum() / (ROWS * LENGTH)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.set_lr(learning_rate(step, steps, config))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    last = sum(losses[-TAIL:]) / TAIL
    return last if math.isfinite(last) else math.inf


def main() -> None:
    """Train the grid and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.mup")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run (default: 200)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds that are averaged (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = corpus()
    for title, base_width in (("standard", None), (f"muP, base_width {WIDTHS[0]}", WIDTHS[0])):
        print(f"| {title} | " + " | ".join(f"2^{exponent}" for exponent in EXPONENTS) + " | best |", flush=True)
        print("| --- |" + " ---: |" * (len(EXPONENTS) + 1), flush=True)
        for width in WIDTHS:
            losses = {
                exponent: sum(
                    last_loss(data, width, 2.0**exponent, base_width, options.steps, seed)
                    for seed in range(options.seeds)
                )
                / options.seeds
                for exponent in EXPONENTS
            }
            best = min(losses, key=lambda exponent: losses[exponent])
            shown = " | ".join(f"{losses[exponent]:.3f}" for exponent in EXPONENTS)
            print(f"| width {width} | {shown} | 2^{best} |", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
