"""Rules for what the numbers of a run show: a loss that goes wrong, and time that is lost."""

from functools import partial

from launch.diagnose import losses, pace
from launch.diagnose.rule import Action, Level, Rule

_sick = partial(Rule, section="The loss goes wrong", level=Level.SICK, action=Action.STOP, hints=losses.hints)
_slow = partial(Rule, section="The run is slow", level=Level.WARNING, action=Action.CONTINUE)

RULES = (
    _sick(
        name="loss-diverges",
        shown="the loss rises again, far above its best value",
        test=losses.diverges,
        cause="the loss diverges",
        remedy="stop, and continue from a checkpoint before with a lower `optim.lr`",
    ),
    _sick(
        name="loss-does-not-fall",
        shown="the loss stays where it began",
        test=losses.is_flat,
        cause="the loss does not fall",
        remedy="stop, and change `optim.lr`; look at the data (`keepstep data show`)",
    ),
    _sick(
        name="loss-oscillates",
        action=Action.CONTINUE,
        shown="the loss jumps up and down from step to step",
        test=losses.oscillates,
        cause="the loss oscillates",
        remedy="a lower `optim.lr`, a longer warm-up or a larger batch",
    ),
    _sick(
        name="loss-spikes",
        action=Action.CONTINUE,
        shown="many steps with a spike",
        test=losses.spikes,
        cause="the loss spikes again and again",
        remedy="`guard.on_spike: skip`; look at the documents of those steps",
    ),
    _slow(
        name="data-wait",
        shown="a large share of `data_wait` in `keepstep report RUN`",
        test=pace.data_wait,
        cause="the ranks wait for data",
        remedy="raise `data.prefetch_batches`; copy the data to a local disk; build larger shards",
    ),
    _slow(
        name="slow-first-step",
        shown="the first step takes minutes",
        test=pace.slow_first_step,
        cause="the first step took far longer than the others: it compiles, or reads cold files",
        remedy="keep the compiler's cache (`TORCHINDUCTOR_CACHE_DIR` on a shared disk), or `parallel.compile: false`",
    ),
    _slow(
        name="starts-without-save",
        shown="several starts among the events, and no save between them",
        test=pace.starts_without_save,
        cause="the run starts again and again, and saves nothing in between",
        remedy="read the event `failed` of each start; save more often (`checkpoint.every`)",
    ),
    _slow(
        name="memory-is-tight",
        shown="`device_alloc_retries` above 0 in the metrics",
        test=pace.memory_is_tight,
        cause="the memory of a device is too full: its allocator frees its cache again and again",
        remedy="lower `train.micro_batch_size`, or set `parallel.activation_checkpointing: selective`",
    ),
    _slow(
        name="too-many-threads",
        level=Level.MANUAL,
        shown="each step is many times slower than before",
        cause="more threads than cores",
        remedy="`OMP_NUM_THREADS=1` per rank, or `OMP_WAIT_POLICY=passive` "
        "([performance](performance.md#threads-that-wait))",
    ),
)
"""The gravest first."""
