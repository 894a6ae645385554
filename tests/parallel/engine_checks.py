"""Programs for ranks: what an engine sends and keeps, and which steps it skips."""

import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.analysis.fake_world import count_parameters
from parallel.analysis.formulas import state_bytes, traffic_bytes
from parallel.analysis.traffic import TrafficCounter
from parallel.bootstrap import Runtime, seed_rank
from parallel.build_engine import build_engine
from parallel.collectives import any_rank, gather_objects, sum_over_ranks
from parallel.engine import Engine
from parallel.engines.initial import fill_model
from parallel.engines.tensor_parallel import cross_entropy_by_row
from parallel.fragments import FlatFragment
from tests.parallel.engine_trial import (
    LOSS,
    LR,
    config_of,
    micro_batches,
    one_step,
    runtime_of,
    trainable,
)


def measure(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Bytes kept and sent in the third step, with four micro batches, and the bytes of the formulas."""
    return {name: measure_one(settings) for name, settings in cases.items()}


def measure_one(settings: dict[str, Any]) -> dict[str, Any]:
    """The measurement of one case. Collective."""
    model = {"n_layers": 4, "d_model": 128, **settings.pop("model", {})}
    config = config_of(**settings)
    runtime = runtime_of(config)
    with torch.device("meta"):
        counts = count_parameters(trainable(**model).build())
    before = _storages()
    engine = build_engine(config, runtime, trainable(**model))
    for step in range(2):
        one_step(engine, runtime, step)
    batches, _ = micro_batches(2, runtime, number=4)
    with TrafficCounter() as traffic:
        engine.forward_backward(batches, LOSS, 1.0)
        after = _storages()
        engine.step(LR, 1.0)
    engine.close()
    return {
        "state": sum(size for key, size in after.items() if key not in before),
        "state by formula": state_bytes(config, runtime.layout, counts),
        "traffic": dict(traffic.bytes),
        "traffic by formula": traffic_bytes(config, runtime.layout, counts, len(batches)),
    }


def _storages() -> dict[int, int]:
    """Bytes of each storage that a live tensor uses, by address."""
    gc.collect()
    plain = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in plain}


def skip(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each engine returns and changes in steps that it must skip."""
    return {name: skip_in_one(settings) for name, settings in cases.items()}


def skip_in_one(settings: dict[str, Any]) -> dict[str, Any]:
    """A step with a non-finite gradient, one with a too large gradient, and a good one. Collective."""
    config = config_of(**settings)
    runtime = runtime_of(config)
    engine = build_engine(config, runtime, trainable())
    one_step(engine, runtime, 0)
    before, result = _snapshot(engine), {}
    batches, _ = micro_batches(1, runtime)
    overflowing = 3e38 / (2**16 if config.precision == "fp16" else 1)  # with the loss scale: near fp32's limit
    engine.forward_backward(batches, LOSS, overflowing if runtime.data_parallel_rank == 0 else 1.0)
    result["norm of a bad step"] = engine.step(LR, 1.0)
    result["bad step moved"] = not _equal(before, _snapshot(engine))
    result["norm of a large step"] = one_step(engine, runtime, 1, norm_limit=lambda _: 1e-3)[1]
    result["large step moved"] = not _equal(before, _snapshot(engine))
    result["norm of a good step"] = one_step(engine, runtime, 1, norm_limit=lambda _: 1e3)[1]
    result["good step moved"] = not _equal(before, _snapshot(engine))
    engine.close()
    return result


def _snapshot(engine: Engine, *, scaler: bool = False) -> list[Tensor]:
    return [tensor.clone() for name, tensor in parts_of(engine).items() if scaler or not name.startswith("scaler.")]


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def reload(cases: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Whether an engine filled in place with another one's state continues with the same bits."""
    return {name: reload_one(settings) for name, settings in cases.items()}


def reload_one(settings: dict[str, Any]) -> bool:
    """The check of `reload` for one case. Collective."""
    config = config_of(**settings)
    runtime = runtime_of(config)
    first, second = (build_engine(config, runtime, trainable()) for _ in range(2))
    one_step(first, runtime, 0)
    one_step(second, runtime, 2)  # another state
    saved = _snapshot(first, scaler=True)
    for tensor, value in zip(parts_of(second).values(), saved, strict=True):
        tensor.copy_(value)
    second.refresh_working_weights()
    return [one_step(first, runtime, step) for step in (1, 2)] == [one_step(second, runtime, step) for step in (1, 2)]


def parts_of(engine: Engine) -> dict[str, Tensor]:
    """The part of the state that this rank keeps, as plain tensors that share its memory."""
    parts: dict[str, Tensor] = {}
    for name, tensor in engine.state().items():
        if isinstance(tensor, FlatFragment):
            parts[name] = tensor.flat
        else:
            parts[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return parts


def small(_: None) -> dict[str, Any]:
    """Results of collectives, seeds and the split loss, on two ranks. Collective."""
    runtime = runtime_of(config_of(engine="fsdp2", tensor=2))
    rank = runtime.world.rank
    data_parallel = runtime_of(config_of(engine="ddp"))
    return {
        "sum": sum_over_ranks(torch.tensor([rank + 1.0])).item(),
        "any": (any_rank(rank == 1), any_rank(False)),
        "gather": gather_objects(rank),
        "peers draw": gather_objects(_draw(runtime)),
        "data-parallel ranks draw": gather_objects(_draw(data_parallel)),
        "loss": _split_loss(runtime),
        "dropout": _losses_with_dropout(runtime),
    }


def _draw(runtime: Runtime) -> float:
    seed_rank(1, runtime, 0)
    return torch.rand(()).item()


def _losses_with_dropout(runtime: Runtime) -> list[Tensor]:
    """Summed losses of one batch with dropout: of the split model, and of the whole one. Collective."""
    made = trainable(dropout=0.3)
    engine = build_engine(config_of(engine="fsdp2", tensor=2), runtime, made)
    whole = made.build()
    fill_model(whole, made.initial_value)
    batches, _ = micro_batches(0, runtime, 1)
    seed_rank(1, runtime, 0)
    split = engine.forward_backward(batches, LOSS, 1.0)
    seed_rank(1, runtime, 0)
    return [split, LOSS(whole, batches[0]).sums.detach()]


def _split_loss(runtime: Runtime) -> list[Tensor]:
    """Loss and gradient of split logits and of whole ones by torch; 2 sequences of 6 tokens, a vocabulary of 16."""
    assert runtime.mesh is not None
    generator = torch.Generator().manual_seed(3)
    logits_BTV = 5 * torch.randn(2, 6, 16, generator=generator)
    labels_BT = torch.randint(0, 16, (2, 6), generator=generator)
    labels_BT[0, 2:4] = -100
    part = logits_BTV.chunk(2, dim=-1)[runtime.world.rank].clone().requires_grad_()
    loss_B = cross_entropy_by_row(part, labels_BT, group=runtime.mesh["tensor"].get_group())
    (loss_B * torch.tensor([1.0, 3.0])).sum().backward()
    whole = logits_BTV.requires_grad_()
    exact_B = F.cross_entropy(whole.mT, labels_BT, ignore_index=-100, reduction="none").sum(dim=1)
    (exact_B * torch.tensor([1.0, 3.0])).sum().backward()
    assert whole.grad is not None
    assert part.grad is not None
    return [loss_B.detach(), exact_B.detach(), part.grad, whole.grad.chunk(2, dim=-1)[runtime.world.rank].clone()]


def all_on_two(cases: dict[str, Any]) -> dict[str, Any]:
    """The results of all checks above, from one start of the ranks. Collective."""
    return {
        "small": small(None),
        "measure": measure(cases["measure"]),
        "skip": skip(cases["skip"]),
        "reload": reload(cases["reload"]),
    }
