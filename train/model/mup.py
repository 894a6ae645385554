"""Maximal update parametrization (muP), with `model.mup`: all of its rules are here.

Let m = d_model / base_width. At m = 1 the model is the standard one, but for the scale of attention.

| what                               | standard            | muP                                           |
| ---------------------------------- | ------------------- | --------------------------------------------- |
| initial std of matrices in blocks  | init_std            | init_std / sqrt(m)                            |
| initial std of embeddings and head | init_std            | the same                                      |
| scores of attention                | q k / sqrt(E)       | q k / E, by a factor on the queries           |
| logits                             | head(x)             | head(x / m)                                   |
| AdamW's lr of matrices in blocks   | lr                  | lr / m                                        |
| Muon's lr of matrices in blocks    | lr                  | lr / sqrt(m)                                  |
| weight decay of these matrices     | weight_decay        | times m or sqrt(m), so lr x weight_decay stays |
| AdamW's eps                        | eps                 | eps / m, as gradients are                     |
| lr of embeddings, head, norms, biases | lr               | lr                                            |

AdamW: Yang et al. 2022 ("Tensor Programs V", table 8, and appendix B.3 for eps and weight decay). Muon: the spectral
norm of its update grows as sqrt(width), and must not (Yang, Simon and Bernstein 2023, condition 1). E: width of a head.
All widths of a block must grow with d_model; the number of heads may grow, or their width.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from train.model.config import ModelConfig


def width_ratio(config: ModelConfig) -> float:
    """m = d_model / base_width; 1 without muP."""
    return 1.0 if config.mup is None else config.d_model / config.mup.base_width


def matrix_std(config: ModelConfig) -> float:
    """Initial standard deviation of the matrices inside blocks."""
    return config.init_std / math.sqrt(width_ratio(config))


def query_multiplier(config: ModelConfig) -> float:
    """Factor of the queries, which makes the scale of attention 1/E instead of 1/sqrt(E); 1 without muP."""
    return 1.0 if config.mup is None else 1 / math.sqrt(config.head_dim)


def output_multiplier(config: ModelConfig) -> float:
    """Factor of what the head gets."""
    return 1 / width_ratio(config)


def lr_scale(config: ModelConfig, *, muon: bool) -> float:
    """Factor of the learning rate of matrices inside blocks, under Muon or AdamW."""
    ratio = width_ratio(config)
    return 1 / (math.sqrt(ratio) if muon else ratio)


def folded(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The weights with which the standard model computes the same function: multipliers folded into them.

    Nothing is rounded if the width ratio is a power of 2 and the head width a power of 4."""
    if config.mup is None:
        return dict(weights)
    into_queries = "attention.query_norm." if config.qk_norm else "attention.query."

    def factor(name: str) -> float:
        if name.startswith("norm."):
            return output_multiplier(config)
        is_query = name.startswith("layers.") and name.split(".", 2)[2].startswith(into_queries)
        return query_multiplier(config) if is_query else 1.0

    return {name: weight * factor(name) if factor(name) != 1.0 else weight for name, weight in weights.items()}
