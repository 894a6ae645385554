"""One rank of a large world, in one process: what it holds and sends, without the other ranks and without memory.

A fake process group completes every collective immediately. The model is built and cut on the meta device. A step runs
on fake tensors, which have shapes but no elements. FSDP2, HSDP, tensor parallelism and DDP can take such a step.
DeepSpeed's hooks need real tensors, so for ZeRO there are only the formulas.
"""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.analysis.formulas import Parameters, state_bytes, traffic_bytes
from parallel.analysis.live_bytes import LiveBytes
from parallel.analysis.traffic import TrafficCounter
from parallel.bootstrap import Runtime
from parallel.config import ParallelConfig
from parallel.engine import BatchLoss, LossFn, Trainable
from parallel.engines.blocks import apply_to_blocks
from parallel.engines.fp8 import in_fp8
from parallel.engines.fsdp2 import materialise, shard_model, wrap_in_engine
from parallel.engines.single import wrap_whole_model
from parallel.engines.torch_engine import TorchEngine
from parallel.environ import World
from parallel.errors import LaunchError
from parallel.layout import Layout, resolve_layout
from parallel.mesh import build_mesh, data_parallel_group
from parallel.optimizer import EngineOptimizer
from parallel.sharded import local_part


@dataclass(frozen=True)
class RankDescription:
    """Bytes and counts of one rank."""

    layout: Layout
    coordinates: tuple[int, ...]
    """Position of the rank along each axis of the layout."""
    parameters: int
    """Number of parameters of the whole model."""
    held_parameters: int
    """Elements of fp32 weights that this rank keeps; under ZeRO by the formula."""
    state_bytes: float
    """Bytes of weights, gradients and optimizer state, by the formula."""
    counted_state_bytes: int | None
    """The same, counted on the fake tensors; None if no step was taken."""
    traffic: dict[str, float]
    """Bytes per step by kind of collective, by the formula, without the traffic of tensor parallelism."""
    counted_traffic: dict[str, int] | None
    """The same, counted in the fake step, with the traffic of tensor parallelism; None if no step was taken."""
    counted_peak_bytes: int | None = None
    """Most bytes that tensors held at the same time in the last micro batch, on a CPU; None if not counted."""


def describe_rank(
    config: ParallelConfig,
    trainable: Trainable,
    *,
    world_size: int,
    rank: int,
    micro_batches: Callable[[Runtime], list[Any]],
    loss_fn: LossFn,
    with_peak: bool = False,
) -> RankDescription:
    """Simulate rank `rank` of `world_size`. Raises LaunchError if the recipe does not fit the world.

    `micro_batches(runtime)` makes the micro batches of one step, on CPU. Nothing is compiled: that changes neither what
    a rank holds nor what it sends. `with_peak`: count live bytes too, which takes another fake step."""
    config = config.model_copy(
        update={"compile": False, "activation_memory_budget": 1.0, "cuda_graphs": False, "async_tensor": False}
    )
    if not 0 <= rank < world_size:
        raise LaunchError(f"--fake-rank ({rank}) must be at least 0 and below --fake-world ({world_size})")
    layout = resolve_layout(config, world_size)
    if config.gathers_fp8:  # the other forms of fp8 hold and send what bf16 does
        trainable = in_fp8(trainable, config, emulate=True)
    with fake_group(world_size, rank), torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
        mesh = build_mesh(layout, "cpu")
        world = World(rank, world_size, 0, 1, "", 0, "fake")
        runtime = Runtime(world, layout, torch.device("cpu"), mesh, data_parallel_group(mesh))
        with torch.device("meta"):
            model = trainable.build()
        whole = sum(parameter.numel() for parameter in model.parameters())
        optimizer = trainable.optimizer(model)
        optimizer.create_state()
        optimizer_bytes = _optimizer_bytes(optimizer) / whole
        engine_of = _prepare(model, config, runtime, trainable)
        counts = count_parameters(model)
        batches = micro_batches(runtime)
        traffic, counted, held, peak = None, None, counts.all // layout.shard, None
        if engine_of is not None:
            whole_copies = config.engine == "ddp" and layout.tensor == 1
            all_alike = whole_copies or (config.reduce_every_micro_batch and layout.replicate == 1)
            with FakeTensorMode(allow_non_fake_inputs=True):
                materialise(model, torch.device("cpu"))
                engine = engine_of()
                traffic = _count_step(engine, batches, loss_fn, all_alike)
                counted, held = _held(engine)
                if with_peak:
                    peak = _count_peak(engine, batches, loss_fn, config)
            if whole_copies and world_size > 1:
                traffic |= {"all_reduce": 4 * held}  # DDP's buckets carry every fp32 gradient once
        return RankDescription(
            layout=layout,
            coordinates=layout.coordinates(rank),
            parameters=whole,
            held_parameters=held,
            state_bytes=state_bytes(config, layout, counts, optimizer_bytes),
            counted_state_bytes=counted,
            traffic=traffic_bytes(config, layout, counts, len(batches)),
            counted_traffic=traffic,
            counted_peak_bytes=peak,
        )


@contextmanager
def fake_group(world_size: int, rank: int) -> Generator[None]:
    """A default process group whose collectives complete immediately, as rank `rank` of `world_size`."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _prepare(
    model: nn.Module, config: ParallelConfig, runtime: Runtime, trainable: Trainable
) -> Callable[[], TorchEngine] | None:
    """Cut the model on the meta device. Returns what builds its engine once it has (fake) memory; None for ZeRO."""
    assert runtime.mesh is not None
    if config.engine == "fsdp2" or runtime.layout.tensor > 1:
        root = shard_model(model, config, runtime.mesh)
        return lambda: wrap_in_engine(root, model, config, runtime, trainable)
    if config.engine in ("ddp", "single"):
        apply_to_blocks(model, config)
        return lambda: wrap_whole_model(model, config, runtime, trainable)
    return None


def count_parameters(model: nn.Module) -> Parameters:
    """The parameters that one tensor-parallel peer holds."""

    def count_of_peer(parameter: nn.Parameter) -> int:
        if not isinstance(parameter, DTensor):
            return parameter.numel()
        names = parameter.device_mesh.mesh_dim_names or ()
        on_tensor = dict(zip(names, parameter.placements, strict=True)).get("tensor")
        size = parameter.device_mesh["tensor"].size() if on_tensor is not None and not on_tensor.is_replicate() else 1
        return parameter.numel() // size

    sizes = {name: count_of_peer(parameter) for name, parameter in model.named_parameters()}
    blocks = sum(size for name, size in sizes.items() if name.startswith("layers."))
    return Parameters(
        blocks=blocks,
        outer=sum(sizes.values()) - blocks,
        n_blocks=len(list(model.get_submodule("layers").children())),
        tables=sum(size for name, size in sizes.items() if name.startswith(("embed.", "positions."))),
    )


def _optimizer_bytes(optimizer: EngineOptimizer) -> int:
    """Bytes that this rank holds of the optimizer's state, without tensors of no dimension such as `step`."""
    tensors = [local_part(tensor) for state in optimizer.state.values() for tensor in state.values() if tensor.dim()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _held(engine: TorchEngine) -> tuple[int, int]:
    """Bytes of weights, gradients and optimizer state; elements of fp32 weights."""
    weights, gradients = _weights_and_gradients(engine)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*weights, *gradients))
    return size + _optimizer_bytes(engine.optimizer), sum(tensor.numel() for tensor in weights)


def _weights_and_gradients(engine: TorchEngine) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's parts of them."""
    parameters = list(engine.model.parameters())
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return [local_part(parameter.detach()) for parameter in parameters], gradients


def _count_peak(engine: TorchEngine, batches: list[Any], loss_fn: LossFn, config: ParallelConfig) -> int:
    """Most live bytes in the last micro batch of a step. A step has been taken before.

    That step left its gradients, as earlier micro batches do. DTensor has cached how it splits operations, which it
    finds out on whole fake tensors."""
    if len(batches) == 1 or not config.reduce_every_micro_batch:
        engine.optimizer.zero_grad(set_to_none=config.engine != "ddp")
    last = batches[-1:] if config.reduce_every_micro_batch else batches[-2:]
    state = [tensor for tensors in engine.optimizer.state.values() for tensor in tensors.values()]
    weights, gradients = _weights_and_gradients(engine)
    with LiveBytes([*weights, *gradients, *map(local_part, state)]) as live:
        engine.forward_backward(last, loss_fn, 1.0)
    return live.peak


def _count_step(engine: TorchEngine, batches: list[Any], loss_fn: LossFn, all_alike: bool) -> dict[str, int]:
    """Bytes of a step by kind of collective.

    All micro batches but the last send the same. So two of them give the traffic of any number; one does if the last
    sends the same too (`all_alike`)."""
    at_start: list[Counter[str]] = []

    def marking_loss(model: nn.Module, batch: Any) -> BatchLoss:
        at_start.append(Counter(traffic.bytes))
        return loss_fn(model, batch)

    with TrafficCounter() as traffic:
        engine.forward_backward(batches[-1:] if all_alike else batches[-2:], marking_loss, 1.0)
    last = traffic.bytes - at_start[-1]
    earlier = last if all_alike else at_start[-1]
    return {kind: last[kind] + (len(batches) - 1) * earlier[kind] for kind in traffic.bytes}
