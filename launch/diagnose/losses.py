"""What the losses of a run show, and what its recipe says about the reason.

Levels of the loss are medians, which single steps do not move. Steps of the warm-up count for nothing.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from launch.diagnose.evidence import Evidence, Line

FEWEST_STEPS = 50
"""Steps after the warm-up before the loss is judged."""
LAST_STEPS = 20
"""Steps whose median is the present level of the loss."""
FLAT_SHARE = 0.02
"""A loss that has come down by less than this share of its first level does not fall."""
JUMP_SHARE = 0.12
"""Median change from one step to the next, as a share of the loss, above which the loss oscillates."""
MANY_SPIKES = 5
USUAL_RATES = (
    (125e6, 6e-4),
    (350e6, 3e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2e-4),
    (6.7e9, 1.2e-4),
    (13e9, 1e-4),
    (175e9, 6e-5),
)
"""Parameters and peak learning rates of GPT-3 (Brown et al. 2020, table 2.1)."""
HIGH_RATE, LOW_RATE = 4.0, 0.02
"""Learning rates above and below these multiples of the usual one are named."""


def _judged(evidence: Evidence) -> list[float]:
    """Return the last finite losses after the warm-up, oldest first; none if there are too few steps."""
    warmup = evidence.number("optim.warmup_steps") or 0.0
    losses = [float(record["loss"]) for record in evidence.curve if record["step"] > warmup]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return finite if len(finite) >= FEWEST_STEPS and evidence.first_losses else []


def _initial(evidence: Evidence) -> float:
    """Return the level from which the loss came down: that of the first steps, or of the first one if they rose."""
    return min(evidence.first_losses[0], median(evidence.first_losses))


def _line(evidence: Evidence, text: str) -> Line:
    return Line(text, float(evidence.curve[-1].get("time", 0.0)))


def is_flat(evidence: Evidence) -> Line | None:
    """Return how little the loss fell since the first steps, if it did not fall."""
    if not (losses := _judged(evidence)):
        return None
    first, last = _initial(evidence), median(losses[-LAST_STEPS:])
    if abs(first - last) >= FLAT_SHARE * abs(first):
        return None
    return _line(evidence, f"loss {last:.4g} after {evidence.curve[-1]['step']} steps, {first:.4g} at the beginning")


def diverges(evidence: Evidence) -> Line | None:
    """Return the rise of the loss, if it is nearer to its first level than to its best one, or above the first."""
    if not (losses := _judged(evidence)):
        return None
    first, last, best = _initial(evidence), median(losses[-LAST_STEPS:]), _best(losses)
    if last <= (first + min(best, first)) / 2 or last - min(best, first) < FLAT_SHARE * abs(first):
        return None
    return _line(evidence, f"loss {last:.4g} at step {evidence.curve[-1]['step']}, after {min(best, first):.4g}")


def oscillates(evidence: Evidence) -> Line | None:
    """Return how much the loss changes from step to step, if that is far more than noise."""
    if not (losses := _judged(evidence)):
        return None
    recent = losses[-FEWEST_STEPS:]
    jump = median(abs(after - before) for before, after in pairwise(recent))
    if jump < JUMP_SHARE * abs(median(recent)):
        return None
    return _line(evidence, f"the loss changes by {jump:.3g} from step to step, around {median(recent):.4g}")


def spikes(evidence: Evidence) -> Line | None:
    """Return how many steps had a spike, if they are many."""
    found = [
        event for event in evidence.of_kind("spike", "skipped", "rolled_back") if "is above" in str(event.get("why"))
    ]
    if len(found) < MANY_SPIKES:
        return None
    return Line(f"{len(found)} spikes, the last: {found[-1].get('why')}", float(found[-1]["time"]))


def _best(losses: Sequence[float]) -> float:
    """Return the lowest level of LAST_STEPS steps in a row."""
    starts = range(0, max(1, len(losses) - LAST_STEPS + 1), LAST_STEPS // 2)
    return min(median(losses[start : start + LAST_STEPS]) for start in starts)


def documents(evidence: Evidence) -> list[str]:
    """Return the command that shows the documents of the newest bad step."""
    bad = [event for event in evidence.of_kind("spike", "skipped", "rolled_back") if "data_step" in event]
    return [f"the newest bad step: `keepstep data trace RUN --data-step {bad[-1]['data_step']}`"] if bad else []


def hints(evidence: Evidence) -> list[str]:
    """Return what in the recipe may be the reason: learning rate, warm-up, clipping, precision, the data."""
    found: list[str] = []
    rate, parameters = evidence.number("optim.lr"), parameter_count(evidence)
    if rate and parameters:
        usual = usual_rate(parameters)
        if not LOW_RATE < rate / usual < HIGH_RATE:
            found.append(f"optim.lr is {rate:g}; {usual:.1g} is usual for {parameters:.2g} parameters (as GPT-3 did)")
    if (warmup := evidence.number("optim.warmup_steps")) is not None and warmup < 10:
        found.append(f"optim.warmup_steps is {warmup:g}; a warm-up of some hundred steps prevents early divergence")
    if (norm := evidence.number("optim.max_grad_norm")) is not None and norm > 10:
        found.append(f"optim.max_grad_norm is {norm:g}, so gradients are hardly clipped; 1 is usual")
    if evidence.setting("parallel.precision") in ("fp16", "fp8"):
        found.append(f"parallel.precision is {evidence.setting('parallel.precision')}; try bf16")
    return found + documents(evidence)


def parameter_count(evidence: Evidence) -> float | None:
    """Return about how many parameters the model has: 12 d^2 for each block, and its embeddings. None if unknown."""
    names = ("model.n_layers", "model.d_model", "model.vocab_size")
    values = [value for name in names if (value := evidence.number(name)) is not None]
    if len(values) < len(names) or min(values) <= 0:
        return None
    layers, width, vocabulary = values
    return 12 * layers * width**2 + vocabulary * width


def usual_rate(parameters: float) -> float:
    """Return the learning rate that is usual for a size: between the rows of USUAL_RATES, on logarithmic scales.

    Smaller models than the first row may use its rate ten times over."""
    if parameters <= USUAL_RATES[0][0]:
        return min(USUAL_RATES[0][1] * (USUAL_RATES[0][0] / parameters) ** 0.3, 10 * USUAL_RATES[0][1])
    for (small, high), (large, low) in pairwise(USUAL_RATES):
        if parameters <= large:
            share = math.log(parameters / small) / math.log(large / small)
            return high * (low / high) ** share
    return USUAL_RATES[-1][1]
