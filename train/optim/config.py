"""The section `optim` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from train.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """The optimizer and the learning-rate schedule."""

    algorithm: Literal["adamw", "muon"] = "adamw"
    """Optimizer: adamw, or muon, which uses Muon for the matrices inside blocks and AdamW for the rest (engines single,
    ddp and fsdp2)."""
    lr: float = Field(gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate, as a share of the peak."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning-rate schedule: cosine, or wsd (warm-up, stable, linear decay)."""
    warmup_steps: int = Field(default=100, ge=0)
    """Optimizer steps of linear warm-up. The learning rate of step 1 is above 0."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the final decay of wsd; null means a fifth of the run."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices. Norms and biases never decay."""
    decay_embeddings: bool = False
    """Whether weight decay also applies to embedding matrices."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the first and second moments, each from 0 to below 1."""
    eps: float = Field(default=1e-8, gt=0)
    """Constant that AdamW adds to the square root of the second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm to which gradients are clipped."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay per step of an exponential moving average of the weights, such as 0.999; null: no average. It takes 4 bytes
    per parameter."""

    def decay_of_wsd(self, total_steps: int) -> int:
        """Optimizer steps of the final decay of wsd, with the default resolved."""
        return self.decay_steps or max(1, total_steps // 5)
