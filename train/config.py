"""The recipe of a run, as frozen pydantic models. `config_file.py` reads it from YAML and overrides."""

import math
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from data_pipeline.batch_sizes import BatchSizes
from data_pipeline.config import BatchSizeChange, DataConfig, ExpandedPath, SeqLenChange
from parallel.config import ParallelConfig
from train.errors import ConfigError
from train.evaluation.config import TasksConfig
from train.model.config import ModelConfig
from train.optim.config import OptimConfig
from train.profiling.config import ProfileConfig
from train.section import Section, nearest_multiple

SinkName = Literal["tensorboard", "wandb", "mlflow", "prometheus"]


def _steps_may_be_missing(schema: dict[str, Any]) -> None:
    """Take `steps` from the required settings of the JSON schema: another length may be given."""
    schema["required"] = [name for name in schema["required"] if name != "steps"]


class TrainConfig(Section):
    """The length of the run, its batch sizes, and its evaluations."""

    model_config = ConfigDict(json_schema_extra=_steps_may_be_missing)

    steps: int = Field(gt=0)
    """Total number of optimizer steps. `tokens` or `epochs` may give the length instead."""
    tokens: float | None = Field(default=None, gt=0)
    """Length of the run in tokens, in place of `steps`, which is computed from it and rounded up. The resolved recipe
    has `steps`."""
    epochs: float | None = Field(default=None, gt=0)
    """Length of the run in passes over the training rows of all sources together, in place of `steps`. The data sets
    must be readable where the recipe is read."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Wall-clock seconds of all attempts together after which the run saves and ends with exit code 0; null: no
    limit. The learning rate does not know of the limit."""
    global_batch_size: int = Field(gt=0, le=1 << 31)
    """Sequences per optimizer step, summed over all ranks."""
    micro_batch_size: int = Field(gt=0)
    """Sequences per rank in one forward pass. Gradient accumulation follows from the two batch sizes."""
    batch_schedule: tuple[BatchSizeChange, ...] = ()
    """Planned changes of `global_batch_size`, in order of step. The learning rate follows steps, not tokens. You can
    edit changes of later steps between two starts of a run."""
    seq_len_schedule: tuple[SeqLenChange, ...] = ()
    """Planned lengths of the rows that the model gets, in order of step; before the first one it is `model.seq_len`.
    Each row of the data is cut into rows of this length, so a step has the same tokens."""
    seed: int = Field(default=1, ge=0)
    """Seed of the initial weights and of dropout."""
    log_every: int = Field(default=10, gt=0)
    """Optimizer steps between progress lines."""
    eval_every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations on the validation split; 0 evaluates only after the last step."""
    eval_sequences: int = Field(default=256, ge=0)
    """Validation sequences in one evaluation; 0 turns evaluation off."""
    evaluations: TasksConfig = TasksConfig()
    hang_seconds: float = Field(default=480.0, gt=0)
    """Seconds without progress on any rank after which the run is aborted. Must exceed the longest start, compilation
    and save."""
    sinks: tuple[SinkName, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl. `wandb` and `mlflow` need the extra of that name. A sink that fails or
    hangs neither stops nor slows the run."""
    prometheus_dir: ExpandedPath | None = None
    """Folder of the sink `prometheus`, the one that node_exporter's textfile collector reads; null: the folder `sinks`
    in the run folder."""
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="after")
    def _batches_fit(self) -> "TrainConfig":
        """`train.global_batch_size` and each one of `train.batch_schedule` must be a multiple of
        `train.micro_batch_size`."""
        micro = self.micro_batch_size
        for name, size in self.named_batch_sizes:
            if size % micro:
                raise ValueError(
                    f"train.{name} ({size}) must be a multiple of train.micro_batch_size ({micro}); the nearest is "
                    f"{nearest_multiple(size, micro)}"
                )
        return self

    @property
    def named_batch_sizes(self) -> list[tuple[str, int]]:
        """Each global batch size with the name of its setting."""
        later = [
            (f"batch_schedule.{number}.global_batch_size", change.global_batch_size)
            for number, change in enumerate(self.batch_schedule)
        ]
        return [("global_batch_size", self.global_batch_size), *later]

    @model_validator(mode="after")
    def _sinks_fit(self) -> "TrainConfig":
        """`train.sinks` must name each sink once. `train.prometheus_dir` needs `prometheus` in `train.sinks`."""
        listed = ", ".join(self.sinks)
        if twice := [name for name in self.sinks if self.sinks.count(name) > 1]:
            raise ValueError(f"train.sinks ({listed}) must name each sink once; remove one {twice[0]}")
        if self.prometheus_dir is not None and "prometheus" not in self.sinks:
            raise ValueError(
                f"train.prometheus_dir ({self.prometheus_dir}) needs prometheus in train.sinks ({listed}); add it "
                "there, or remove train.prometheus_dir"
            )
        return self


class GuardConfig(Section):
    """Handling of loss spikes and non-finite gradients, and the comparison of replicas."""

    on_spike: Literal["report", "skip", "rollback"] = "report"
    """Action when the loss or gradient norm is far above the last ones: report it, skip the batch, or roll back to the
    newest checkpoint and skip the batch there."""
    window: int = Field(default=128, ge=8)
    """Number of recent steps that a spike is measured against. Detection starts after a quarter of them."""
    tolerance: float = Field(default=8.0, gt=0)
    """Distance of a spike above the upper quartile of the window, in interquartile ranges."""
    max_consecutive_bad_steps: int = Field(default=10, gt=0)
    """Number of consecutive bad steps (not finite, skipped or rolled back) that the run tolerates before it fails."""
    max_bad_steps: int = Field(default=100, gt=0)
    """Number of bad steps in the whole run that it tolerates before it fails."""
    compare_replicas_every: int = Field(default=100, ge=0)
    """Optimizer steps between comparisons of replicas over ranks; 0 turns them off."""


class CheckpointConfig(Section):
    """When checkpoints are written, and which of them are kept."""

    every: int = Field(default=500, gt=0)
    """Optimizer steps between checkpoints. The last step is always saved."""
    keep_last: int = Field(default=3, gt=0)
    """Number of newest checkpoints kept."""
    keep_every: int = Field(default=0, ge=0)
    """Interval, in optimizer steps, of checkpoints that are never deleted; 0 turns this off."""
    keep_best: int = Field(default=0, ge=0)
    """Number of checkpoints with the lowest validation loss that are kept in addition. Above 0, the run evaluates
    before each of them."""
    background: bool = True
    """Whether checkpoints are written in the background, while training continues. Steps then wait only for the copy to
    host memory."""
    max_failures: int = Field(default=3, gt=0)
    """Number of consecutive failed saves to the shared tier after which the run fails."""
    local_dir: str | None = None
    """Node-local folder for the fast tier of checkpoints (NVMe, /dev/shm); null turns the fast tier off. Each node
    expands `~` and `$NAME` in it for itself."""
    local_every: int = Field(default=50, gt=0)
    """Optimizer steps between checkpoints in the fast tier."""


class Recipe(Section):
    """The settings of one training run."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder."""
    runs_dir: ExpandedPath = "runs"
    """Parent folder of all run folders, on a file system that all ranks share. In paths, `~` and `$NAME` stand for the
    home folder and for environment variables."""
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()

    @model_validator(mode="after")
    def _fits(self) -> "Recipe":
        """`runs_dir`, `checkpoint.local_dir` and `train.prometheus_dir` must be folders, not addresses.
        `optim.algorithm: muon` does not work with `zero1`, `zero2` and `zero3`. `train.global_batch_size` must be a
        multiple of `train.micro_batch_size` x data-parallel ranks. `train.hang_seconds` must be below
        `parallel.timeout_seconds`. `optim.warmup_steps` must be below `train.steps`. With `optim.schedule: wsd`,
        its sum with `optim.decay_steps` must be at most `train.steps`. `checkpoint.keep_best` needs
        `train.eval_sequences` above 0. `parallel.tensor` must divide `model.seq_len`, `n_heads`, `n_kv_heads`,
        `d_ff` and `vocab_size`. With `parallel.precision: fp8`, the sides of the model's matrices and
        `model.seq_len` must be multiples of 16. `train.evaluations.tasks` need
        `parallel.tensor` 1. Each `train.seq_len_schedule.seq_len` must divide `model.seq_len`."""
        train, optim = self.train, self.optim
        for name, path in (
            ("runs_dir", self.runs_dir),
            ("checkpoint.local_dir", self.checkpoint.local_dir),
            ("train.prometheus_dir", train.prometheus_dir),
        ):
            if path and path.startswith("-"):
                raise ValueError(f"{name} ({path}) reads like an option in a command line; write ./{path}")
            if path and "://" in path:
                raise ValueError(
                    f"{name} ({path}) must be a folder of a file system, not an address: a run writes to it all the "
                    "time; to keep checkpoints in an object store, copy them there with `keepstep checkpoint copy`"
                )
        if optim.algorithm == "muon" and self.parallel.engine.startswith("zero"):
            raise ValueError(
                f"optim.algorithm (muon) needs whole matrices, which parallel.engine ({self.parallel.engine}) splits; "
                "set parallel.engine to fsdp2, or optim.algorithm to adamw"
            )
        if train.hang_seconds >= self.parallel.timeout_seconds:
            raise ValueError(
                f"train.hang_seconds ({train.hang_seconds:g}) must be below parallel.timeout_seconds "
                f"({self.parallel.timeout_seconds:g}), so that a hang is diagnosed before a collective times out; "
                "lower the first or raise the second"
            )
        self.parallel.check_model(
            seq_len=self.model.seq_len,
            n_heads=self.model.n_heads,
            n_kv_heads=self.model.kv_heads,
            d_model=self.model.d_model,
            d_ff=self.model.ff_width,
            vocab_size=self.model.vocab_size,
        )
        self._check_seq_lens()
        if train.evaluations.tasks and self.parallel.tensor > 1:
            raise ValueError(
                f"train.evaluations.tasks needs whole logits, which parallel.tensor ({self.parallel.tensor}) splits; "
                "set parallel.tensor to 1, or evaluate checkpoints: keepstep eval RUN --tasks TASKS"
            )
        if optim.warmup_steps >= train.steps:
            raise ValueError(
                f"optim.warmup_steps ({optim.warmup_steps}) must be below train.steps ({train.steps}); "
                "shorten the warm-up or train longer"
            )
        decay = optim.decay_of_wsd(train.steps)
        if optim.schedule == "wsd" and optim.warmup_steps + decay > train.steps:
            raise ValueError(
                f"optim.warmup_steps ({optim.warmup_steps}) + optim.decay_steps ({decay}) must be at most train.steps "
                f"({train.steps}), or the rate drops at once after the warm-up; set optim.decay_steps to "
                f"{train.steps - optim.warmup_steps} or less, or shorten the warm-up"
            )
        if self.checkpoint.keep_best and not train.eval_sequences:
            raise ValueError(
                f"checkpoint.keep_best ({self.checkpoint.keep_best}) needs validation losses, but train.eval_sequences "
                "(0) turns evaluation off; set it above 0, or keep_best to 0"
            )
        return self

    @model_validator(mode="after")
    def _schedules_fit(self) -> "Recipe":
        """`train.batch_schedule` and `train.seq_len_schedule` must be in order of step."""
        for name, changes in (("batch_schedule", self.batch_changes), ("seq_len_schedule", self.seq_lens)):
            steps = [step for step, _ in changes]
            if steps != sorted(set(steps)):
                raise ValueError(f"train.{name} must be in order of step, each step once, not {steps}")
        return self

    @property
    def batch_changes(self) -> tuple[tuple[int, int], ...]:
        """The planned batch sizes after the first one: (first step, sequences)."""
        found: list[tuple[int, int]] = []
        for change in self.train.batch_schedule:
            sizes = BatchSizes.of(self.train.global_batch_size, changes=found)
            found.append((self._step_of(change, sizes), change.global_batch_size))
        return tuple(found)

    @property
    def batch_sizes(self) -> BatchSizes:
        """All planned batch sizes."""
        return BatchSizes.of(self.train.global_batch_size, changes=self.batch_changes)

    @property
    def seq_lens(self) -> tuple[tuple[int, int], ...]:
        """The planned lengths of rows: (first step, tokens)."""
        return tuple(
            (self._step_of(change, self.batch_sizes), change.seq_len) for change in self.train.seq_len_schedule
        )

    def _step_of(self, change: BatchSizeChange | SeqLenChange, sizes: BatchSizes) -> int:
        """The first step of a change. `sizes`: the batch sizes before it."""
        if change.tokens is None:
            return change.step or 0
        return sizes.steps_for(math.ceil(change.tokens / self.model.seq_len))

    def _check_seq_lens(self) -> None:
        """ValueError unless each planned length divides `model.seq_len`, and fits `parallel` as that one does."""
        whole = self.model.seq_len
        for number, change in enumerate(self.train.seq_len_schedule):
            seq_len = change.seq_len
            if whole % seq_len:
                raise ValueError(
                    f"train.seq_len_schedule.{number}.seq_len ({seq_len}) must divide model.seq_len ({whole}), so that "
                    f"each token is trained on once; the next lower one that does is "
                    f"{max(n for n in range(1, min(seq_len, whole) + 1) if whole % n == 0)}"
                )
            multiple = math.lcm(self.parallel.tensor, 16 if self.parallel.precision == "fp8" else 1)
            if seq_len % multiple:
                raise ValueError(
                    f"train.seq_len_schedule.{number}.seq_len ({seq_len}) must be a multiple of {multiple}, as "
                    f"model.seq_len must with parallel.tensor ({self.parallel.tensor}) and parallel.precision "
                    f"({self.parallel.precision}); set it to {nearest_multiple(seq_len, multiple)}"
                )

    def saves_after(self, step: int) -> bool:
        """Return whether the run saves a checkpoint to the shared tier after an optimizer step."""
        return step == self.train.steps or step % self.checkpoint.every == 0

    def evaluates_after(self, step: int) -> bool:
        """Return whether the run evaluates the validation split after an optimizer step."""
        every = self.train.eval_every
        due = step == self.train.steps or (every > 0 and step % every == 0)
        due = due or (self.checkpoint.keep_best > 0 and self.saves_after(step))
        return due and self.train.eval_sequences > 0

    def runs_tasks_after(self, step: int) -> bool:
        """Return whether the run evaluates the tasks of `train.evaluations` after an optimizer step."""
        settings = self.train.evaluations
        return bool(settings.tasks) and (step == self.train.steps or step % settings.every == 0)

    def grad_accum_steps(self, data_parallel_size: int) -> int:
        """Micro batches per rank in the first optimizer step. ConfigError if a global batch does not divide evenly."""
        micro = self.train.micro_batch_size
        chunk = micro * data_parallel_size
        for name, size in self.train.named_batch_sizes:
            if size % chunk:
                below, above = size // chunk * chunk, -(-size // chunk) * chunk
                raise ConfigError(
                    f"train.{name} ({size}) must be a multiple of train.micro_batch_size ({micro}) x "
                    f"data-parallel ranks ({data_parallel_size}) = {chunk}; {size / chunk:.4g} is not whole: use "
                    + " or ".join(str(n) for n in (below, above) if n)
                )
        return self.train.global_batch_size // chunk
