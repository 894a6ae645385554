"""The section `optim` of a recipe."""

from typing import Literal

from pydantic import Field

from train.section import Section


class OptimConfig(Section):
    """The optimizer and the learning-rate schedule."""

    algorithm: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon: the matrices inside blocks by Muon, the rest by AdamW (single, ddp and fsdp2)."""
    lr: float = Field(gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate over the peak."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Cosine, or warm-up, stable, linear decay."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps of linear warm-up; step 1 is never 0."""
    decay_steps: int | None = Field(default=None, ge=1)
    """wsd: steps of the final decay; null: a fifth of the run."""
    weight_decay: float = Field(default=0.1, ge=0)
    """On matrices only; norms and biases never decay."""
    decay_embeddings: bool = False
    """Decay the embedding matrices as well."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
