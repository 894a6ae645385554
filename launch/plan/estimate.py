"""The plan of one recipe on a number of GPUs: memory, time, failures, storage and cost together."""

from dataclasses import dataclass, field

from launch.plan.activations import Backend
from launch.plan.failures import GPU_HOURS_PER_FAILURE, Reliability, reliability
from launch.plan.machine import Machine
from launch.plan.memory import ADAMW, AVERAGE, Memory, memory
from launch.plan.shapes import Arrangement, ModelShape
from launch.plan.step import StepTime, step_seconds
from parallel.layout import resolve_layout
from train.config import Recipe
from train.errors import ConfigError
from train.model.config import ModelConfig

TOKEN_BYTES = 4
"""Bytes of a token in a data set's shards; 2 for vocabularies up to 65,536."""
COPY_BYTES_PER_SECOND = 10e9
"""Speed of copying state from a GPU to host memory. An assumption below PCIe 4's 25 GB/s."""


@dataclass(frozen=True)
class Assumptions:
    """What a plan cannot know; each is an option of the command."""

    gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE["llama3"]
    restart_seconds: float = 600.0
    """Time from a failure to the next step."""
    storage_gb_s: float = 50.0
    """Bandwidth of the shared file system to all nodes together."""
    price: float | None = None
    """Price of a GPU-hour."""
    price_kwh: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a run will take."""

    model: ModelShape
    arrangement: Arrangement
    machine: Machine
    memory: Memory
    step: StepTime
    tokens: float
    """Tokens of the whole run."""
    reliability: Reliability
    checkpoint_bytes: float
    save_seconds: float
    """Time in which the shared file system takes a checkpoint."""
    assumptions: Assumptions = field(default_factory=Assumptions)

    @property
    def fits(self) -> bool:
        """Whether the GPU has as much memory."""
        return self.memory.fits(self.machine)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.arrangement.global_batch_size * self.model.seq_len

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs together, while the run trains."""
        return self.tokens_per_step / self.step.total

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: causal FLOP without recomputation, of the peak in the recipe's precision."""
        flops = self.tokens_per_second * self.model.flops_per_token / self.arrangement.gpus
        return flops / self.machine.peak(self.arrangement.precision)

    @property
    def days(self) -> float:
        """Days that the run takes, with failures, restarts and checkpoints."""
        return self.tokens / self.tokens_per_second / self.reliability.goodput / 86_400

    @property
    def gpu_hours(self) -> float:
        """GPU-hours that the run takes."""
        return self.days * 24 * self.arrangement.gpus

    @property
    def cost(self) -> float | None:
        """GPU-hours times their price, and energy times its price; None without either price."""
        if self.assumptions.price is None and self.assumptions.price_kwh is None:
            return None
        energy = self.machine.watts / 1000 * (self.assumptions.price_kwh or 0)
        return self.gpu_hours * ((self.assumptions.price or 0) + energy)

    @property
    def staging_bytes(self) -> float:
        """Host memory of a node of 8 GPUs in which a checkpoint is staged."""
        return self.checkpoint_bytes * min(8, self.arrangement.gpus) / self.arrangement.gpus

    @property
    def data_bytes_per_second(self) -> float:
        """Bytes per second that all ranks together read from data sets."""
        size = TOKEN_BYTES if self.model.vocab_size > 65_536 else TOKEN_BYTES // 2
        return self.tokens_per_second * size


def plan_recipe(
    recipe: Recipe, gpus: int, machine: Machine, assumptions: Assumptions, tokens: float | None = None
) -> Plan:
    """The plan of a recipe. ConfigError or LaunchError if it does not fit the number of ranks, as at a start."""
    precision = recipe.parallel.precision
    if not (machine.has(precision) or precision == "fp32" or machine.cpu):
        raise ConfigError(
            f"parallel.precision ({precision}): this GPU's matrix units have {', '.join(machine.peak_tflops)}; "
            "set it to bf16, or choose another --gpu"
        )
    model, arrangement = shape_of(recipe.model), arrangement_of(recipe, gpus)
    optimizer_bytes = _optimizer_bytes(recipe)
    optimizer_bytes += 0 if recipe.optim.ema_decay is None else AVERAGE
    state = model.parameters * (4 + optimizer_bytes)
    save = state / (assumptions.storage_gb_s * 1e9)
    stall = state / arrangement.gpus / COPY_BYTES_PER_SECOND
    return Plan(
        model=model,
        arrangement=arrangement,
        machine=machine,
        memory=memory(model, arrangement, optimizer_bytes, machine.backend),
        step=step_seconds(model, arrangement, machine),
        tokens=tokens or float(recipe.batch_sizes.first_sample(recipe.train.steps) * model.seq_len),
        reliability=reliability(
            gpus,
            assumptions.gpu_hours_per_failure,
            stall_seconds=stall,
            save_seconds=save,
            restart_seconds=assumptions.restart_seconds,
        ),
        checkpoint_bytes=state,
        save_seconds=save,
        assumptions=assumptions,
    )


def memory_of(recipe: Recipe, ranks: int, backend: Backend = "gpu") -> Memory:
    """Memory of a rank of a recipe. ConfigError or LaunchError as of `plan_recipe`."""
    return memory(shape_of(recipe.model), arrangement_of(recipe, ranks), _optimizer_bytes(recipe), backend)


def _optimizer_bytes(recipe: Recipe) -> float:
    return ADAMW if recipe.optim.algorithm == "adamw" else ADAMW / 2


def shape_of(config: ModelConfig) -> ModelShape:
    """The sizes of a recipe's model."""
    return ModelShape(
        n_layers=config.n_layers,
        d_model=config.d_model,
        n_heads=config.n_heads,
        n_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        d_ff=config.ff_width,
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
        gated=config.activation == "swiglu",
        tied=config.tied_embeddings,
        learned_positions=config.positions == "learned",
    )


def arrangement_of(recipe: Recipe, gpus: int) -> Arrangement:
    """How a recipe arranges that many ranks, by the code that refuses a recipe at a start."""
    parallel = recipe.parallel
    layout = resolve_layout(parallel, gpus)
    try:
        micro_batches = recipe.grad_accum_steps(layout.data_parallel_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Arrangement(
        data=layout.data_parallel_size,
        shard=layout.shard,
        tensor=layout.tensor,
        engine=parallel.engine,
        micro_batch_size=recipe.train.micro_batch_size,
        micro_batches=micro_batches,
        precision=parallel.precision,
        recomputation=parallel.activation_checkpointing,
        recompute_every=parallel.checkpoint_every_k_blocks,
        offload=parallel.cpu_offload,
        reduce_every_micro_batch=parallel.reduce_every_micro_batch,
        reshard_after_forward=parallel.reshard_after_forward,
    )
