"""The runs of a ladder: the recipe's model at other sizes, each trained on the same number of tokens per parameter.

Width, heads and layers are scaled together: heads keep their width, so the width is a multiple of it, and the number of
layers for each width is the one that comes nearest to the size. Among those within SIZE_ERROR of the size, the one is
chosen that is near to it and has nearly the recipe's ratio of width to layers. `d_ff` and `n_kv_heads`, if given, keep
their ratios.
Warm-up and decay keep their shares of the run. All else, such as the batch and the learning rate, stays: with
`model.mup` one learning rate suits all sizes.
"""

import math
from collections.abc import Iterator, Sequence

from launch.numbers import count, short_count
from launch.plan.estimate import shape_of
from launch.sweeps.runs import PlannedRun, plan_run
from train.config import Recipe
from train.config_file import load_recipe
from train.errors import ConfigError
from train.model.config import ModelConfig
from train.run_length import LENGTHS

SIZE_ERROR = 0.25
"""Relative difference from the wanted size that a model may have. The fit uses the size that it has."""
SHAPE_WEIGHT = 0.1
"""Weight of a relative difference in the shape, beside one in the size."""
D_FF_MULTIPLE = 64
MOST_LAYERS = 1000


def read_sizes(text: str) -> list[float]:
    """Numbers of parameters such as `1M,3M,10M`, in increasing order. ConfigError for any other text."""
    parse = count("--sizes", "1M,3M,10M,30M")
    sizes = [parse(word) for word in text.split(",")]
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"--sizes ({text[:200]}) gives a size twice; give each once")
    return sorted(sizes)


def read_ratios(text: str) -> list[float]:
    """Tokens per parameter such as `20` or `5,20`. ConfigError for any other text."""
    ratios: list[float] = []
    for word in text.split(","):
        try:
            ratios.append(float(word))
        except ValueError:
            ratios.append(math.nan)
    if not all(0 < ratio < 1e6 for ratio in ratios) or len(set(ratios)) < len(ratios):
        raise ConfigError(
            f"--tokens-per-parameter ({text[:200]}) must be different positive numbers, such as 20 or 5,20"
        )
    return ratios


def rungs(
    recipe_file: str, overrides: Sequence[str], sizes: Sequence[float], ratios: Sequence[float]
) -> list[PlannedRun]:
    """The runs of the ladder, from the smallest. ConfigError if no model has such a size."""
    recipe = load_recipe(recipe_file, overrides)
    kept = [override for override in overrides if override.partition("=")[0] not in LENGTHS]
    found: list[PlannedRun] = []
    for size in sizes:
        model = model_of_size(recipe, size)
        for ratio in ratios:
            name = f"{recipe.name}-ladder-{short_count(size)}" + (f"-x{ratio:g}" if len(ratios) > 1 else "")
            settings = [*kept, *_model_settings(recipe.model, model), *_lengths(recipe, model, ratio)]
            found.append(plan_run(recipe_file, settings, name))
    return found


def model_of_size(recipe: Recipe, size: float) -> ModelConfig:
    """The recipe's model scaled to a number of parameters. ConfigError if none comes within SIZE_ERROR."""
    models = list(_models(recipe, size))
    near = [model for model in models if abs(parameters_of(model) / size - 1) <= SIZE_ERROR]
    if not near:
        sizes = sorted({parameters_of(model) for model in models}, key=lambda number: abs(math.log(number / size)))
        hint = f"; the nearest have {' and '.join(f'{number:,}' for number in sorted(sizes[:2]))}" if sizes else ""
        raise ConfigError(
            f"no model like {recipe.name} has about {short_count(size)} parameters with heads of width "
            f"{recipe.model.head_dim} and {recipe.model.vocab_size} rows of embeddings{hint}; change --sizes, or "
            "model.n_heads or model.vocab_size"
        )
    wanted = recipe.model.d_model / recipe.model.n_layers

    def distance(model: ModelConfig) -> float:
        shape = model.d_model / model.n_layers / wanted
        return abs(math.log(parameters_of(model) / size)) + SHAPE_WEIGHT * abs(math.log(shape))

    return min(near, key=distance)


def _models(recipe: Recipe, size: float) -> Iterator[ModelConfig]:
    """For each width, the model whose number of layers comes nearest to the size."""
    base = recipe.model
    per_group = base.n_heads // base.kv_heads
    heads_multiple = per_group * recipe.parallel.tensor
    heads = heads_multiple
    while heads * base.head_dim * base.vocab_size <= (1 + SIZE_ERROR) * size or heads == heads_multiple:
        d_model = heads * base.head_dim
        d_ff = None if base.d_ff is None else _multiple(base.d_ff * d_model / base.d_model)
        changes = {"d_model": d_model, "n_heads": heads, "d_ff": d_ff}
        changes |= {"n_kv_heads": None if base.n_kv_heads is None else heads // per_group}
        one, two = (base.model_copy(update={**changes, "n_layers": layers}) for layers in (1, 2))
        block = parameters_of(two) - parameters_of(one)
        layers = max(1, round((size - parameters_of(one)) / block) + 1)
        if layers <= MOST_LAYERS:
            yield base.model_copy(update={**changes, "n_layers": layers})
        heads += heads_multiple


def _multiple(d_ff: float) -> int:
    return max(1, round(d_ff / D_FF_MULTIPLE)) * D_FF_MULTIPLE


def _model_settings(base: ModelConfig, model: ModelConfig) -> list[str]:
    """The overrides that make the scaled model of the recipe's."""
    names = ["n_layers", "n_heads", "d_model", *(["d_ff"] if base.d_ff else [])]
    names += ["n_kv_heads"] if base.n_kv_heads else []
    return [f"model.{name}={getattr(model, name)}" for name in names]


def _lengths(recipe: Recipe, model: ModelConfig, ratio: float) -> list[str]:
    """The overrides for the length of the run: steps, and warm-up and decay in the recipe's shares of them."""
    tokens_per_step = recipe.train.global_batch_size * recipe.model.seq_len
    steps = math.ceil(parameters_of(model) * ratio / tokens_per_step)
    share = steps / recipe.train.steps
    lengths = [f"train.steps={steps}", f"optim.warmup_steps={min(steps - 1, round(recipe.optim.warmup_steps * share))}"]
    if recipe.optim.decay_steps is not None:
        lengths.append(f"optim.decay_steps={max(1, round(recipe.optim.decay_steps * share))}")
    return lengths


def parameters_of(model: ModelConfig) -> int:
    """Number of parameters, as `keepstep plan` counts them."""
    return shape_of(model).parameters


def tokens_of(recipe: Recipe) -> int:
    """Training tokens of a run."""
    return recipe.train.steps * recipe.train.global_batch_size * recipe.model.seq_len
