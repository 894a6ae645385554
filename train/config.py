"""The recipe: what a run trains, as frozen pydantic models. `config_file.py` reads it from YAML and overrides."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data_pipeline.config import DataConfig
from parallel.config import ParallelConfig
from train.errors import ConfigError


class Section(BaseModel):
    """Frozen, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    """The GPT. GPT-2 style and Llama style are settings of one class."""

    vocab_size: int = Field(gt=0)
    """Rows of the embedding; at least the tokenizer's size. A multiple of 64 is fastest."""
    seq_len: int = Field(gt=0)
    """Tokens in a row; a divisor of the row length that the data were built for."""
    n_layers: int = Field(gt=0)
    """Transformer blocks."""
    n_heads: int = Field(gt=0)
    """Query heads."""
    n_kv_heads: int | None = Field(default=None, gt=0)
    """Key and value heads (grouped-query attention); null: as many as n_heads."""
    d_model: int = Field(gt=0)
    """Width of the residual stream."""
    d_ff: int | None = Field(default=None, gt=0)
    """Width of the feed-forward layer; null: 4 d_model for gelu, 8/3 d_model rounded up to 64 for swiglu."""
    positions: Literal["rope", "learned"] = "rope"
    """How a token knows its place."""
    rope_base: float = Field(default=10_000.0, gt=0)
    """Longest wavelength of RoPE, in units of 2 pi tokens."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before each sub-layer and before the head."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Of the feed-forward layer."""
    bias: bool = False
    """Biases in linear layers and LayerNorms (GPT-2 has them)."""
    tied_embeddings: bool = True
    """The head uses the embedding's matrix."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the embedding and on each sub-layer's output."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial matrices; residual outputs get init_std / sqrt(2 n_layers)."""

    @model_validator(mode="after")
    def _shapes(self) -> "ModelConfig":
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model ({self.d_model}) must be a multiple of n_heads ({self.n_heads}); "
                f"the nearest is d_model={_nearest_multiple(self.d_model, self.n_heads)}"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.kv_heads})")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"RoPE needs an even head width, but d_model / n_heads is {self.head_dim}; change n_heads")
        return self

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def ff_width(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.activation == "gelu" else -(-self.d_model * 8 // 3 // 64) * 64


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


class TrainConfig(Section):
    """How long, how much at a time, and what is measured on the way."""

    steps: int = Field(gt=0)
    """Optimizer steps in all."""
    global_batch_size: int = Field(gt=0)
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = Field(gt=0)
    """Sequences per rank in one forward pass."""
    seed: int = Field(default=1, ge=0)
    """Of the initial weights and of dropout."""
    log_every: int = Field(default=10, gt=0)
    """Optimizer steps between progress lines."""
    eval_every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations on the held-out split; 0: only after the last step."""
    eval_sequences: int = Field(default=256, ge=0)
    """Held-out sequences in one evaluation; 0: none at all."""
    hang_seconds: float = Field(default=480.0, gt=0)
    """How long no rank may get on before the run is ended; longer than the longest start, compilation or save."""


class GuardConfig(Section):
    """What is done about losses and gradients that are not what they should be."""

    on_spike: Literal["report", "skip", "rollback"] = "report"
    """Loss or gradient norm far above the last ones: report it, skip the batch, or go back to the newest checkpoint and
    step over the batch."""
    window: int = Field(default=128, ge=8)
    """Steps that a spike is measured against; a quarter of them must have passed."""
    tolerance: float = Field(default=8.0, gt=0)
    """A spike is above the upper quartile of the window by this many interquartile ranges."""
    max_in_a_row: int = Field(default=10, gt=0)
    """Bad steps (not finite, skipped or rolled back) without a good one between them after which the run has failed."""
    max_in_all: int = Field(default=100, gt=0)
    """Bad steps in all after which the run has failed."""
    compare_replicas_every: int = Field(default=100, ge=0)
    """Optimizer steps between comparisons of what several ranks hold copies of; 0: never."""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    every: int = Field(default=500, gt=0)
    """Optimizer steps between checkpoints. The last step is always saved."""
    keep_last: int = Field(default=3, gt=0)
    """Newest checkpoints kept."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints at multiples of this step are kept for good; 0: none."""
    keep_best: int = Field(default=0, ge=0)
    """Checkpoints with the lowest held-out loss that are kept as well."""
    background: bool = True
    """Write behind the steps; the only stall is the copy to host memory."""
    max_failures: int = Field(default=3, gt=0)
    """Failed saves in a row after which the run stops."""
    local_dir: str | None = None
    """Node-local folder for the fast tier (NVMe, /dev/shm); null: one tier only."""
    local_every: int = Field(default=50, gt=0)
    """Optimizer steps between checkpoints of the fast tier."""


class Recipe(Section):
    """One training run."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run folder."""
    runs_dir: str = "runs"
    """Where run folders are; a file system that all ranks share."""
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()

    @model_validator(mode="after")
    def _fits(self) -> "Recipe":
        train, optim = self.train, self.optim
        if optim.algorithm == "muon" and self.parallel.engine.startswith("zero"):
            raise ValueError(
                f"optim.algorithm muon needs whole matrices; not with parallel.engine {self.parallel.engine}: "
                "set parallel.engine to fsdp2, or optim.algorithm to adamw"
            )
        if train.global_batch_size % train.micro_batch_size:
            raise ValueError(
                f"train.global_batch_size ({train.global_batch_size}) must be a multiple of "
                f"train.micro_batch_size ({train.micro_batch_size}); the nearest is "
                f"{_nearest_multiple(train.global_batch_size, train.micro_batch_size)}"
            )
        if train.hang_seconds >= self.parallel.timeout_seconds:
            raise ValueError(
                f"train.hang_seconds ({train.hang_seconds:g}) must be below parallel.timeout_seconds "
                f"({self.parallel.timeout_seconds:g}), so that a hanging rank is named before a collective gives up"
            )
        self.parallel.check_model(
            seq_len=self.model.seq_len,
            n_heads=self.model.n_heads,
            n_kv_heads=self.model.kv_heads,
            d_model=self.model.d_model,
            d_ff=self.model.ff_width,
            vocab_size=self.model.vocab_size,
        )
        if optim.warmup_steps >= train.steps:
            raise ValueError(f"optim.warmup_steps ({optim.warmup_steps}) must be below train.steps ({train.steps})")
        return self

    def grad_accum_steps(self, data_parallel_size: int) -> int:
        """Micro batches per rank in one step. ConfigError if the batch does not divide evenly."""
        size, micro = self.train.global_batch_size, self.train.micro_batch_size
        chunk = micro * data_parallel_size
        if size % chunk:
            below, above = size // chunk * chunk, -(-size // chunk) * chunk
            raise ConfigError(
                f"train.global_batch_size ({size}) must be a multiple of train.micro_batch_size ({micro}) x "
                f"data-parallel ranks ({data_parallel_size}) = {chunk}; {size / chunk:.4g} is not whole: use "
                + " or ".join(str(n) for n in (below, above) if n)
            )
        return size // chunk


def _nearest_multiple(value: int, of: int) -> int:
    return max(1, round(value / of)) * of
