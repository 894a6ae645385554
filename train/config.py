"""The recipe: what a run trains, as frozen pydantic models. `config_file.py` reads it from YAML and overrides."""

from typing import Literal

from pydantic import Field, model_validator

from data_pipeline.config import DataConfig
from parallel.config import ParallelConfig
from train.errors import ConfigError
from train.model.config import ModelConfig
from train.optim.config import OptimConfig
from train.section import Section, nearest_multiple


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
    """Optimizer steps between evaluations on the validation split; 0: only after the last step."""
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
    """Checkpoints with the lowest validation loss that are kept as well."""
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
                f"{nearest_multiple(train.global_batch_size, train.micro_batch_size)}"
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
