"""Tensor parallelism (Shoeybi et al. 2019) with sequence-parallel norms (Korthikanti et al. 2022), on torch's DTensor.

Shapes: B micro batch, T sequence, D d_model, V vocabulary. Peers are the N ranks of the `tensor` axis; they see the
same tokens and together hold one copy of the model.

| part                               | weight is cut along      | its output is            |
| ---------------------------------- | ------------------------ | ------------------------ |
| embed, positions                   | rows (vocabulary, place) | cut along T              |
| norms, residual stream, dropout    | not at all               | cut along T              |
| query, key, value, gate, up        | outputs (heads, d_ff)    | cut along heads or d_ff  |
| attention.output, mlp.down         | inputs                   | summed, cut along T      |
| head                               | outputs (vocabulary)     | cut along V, never whole |

In a block and micro batch, forward: two all-gathers and two reduce-scatters of the (B, T, D) activations; backward: the
same again mirrored. The loss exchanges three numbers per token.

Peers draw the same random numbers, so each T/N-long part of a row gets the same dropout mask.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def split_model(model: nn.Module, tensor_mesh: DeviceMesh) -> None:
    """Make the parameters DTensors over the `tensor` axis, in place. On the meta device nothing moves."""
    tied = model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    _apply(model, tensor_mesh, _outer_plan())
    for block in model.get_submodule("layers").children():
        _apply(block, tensor_mesh, _block_plan())
    if tied:
        model.get_submodule("head").weight = model.get_parameter("embed.weight")
    group = tensor_mesh.get_group()
    model.loss_by_row = partial(cross_entropy_by_row, group=group)  # pyright: ignore[reportArgumentType]


def _apply(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    present = {name: style for name, style in plan.items() if _find(module, name) is not None}
    parallelize_module(module, mesh, present, src_data_rank=None)


def _find(module: nn.Module, name: str) -> nn.Module | None:
    for part in name.split("."):
        module = getattr(module, part, None)  # pyright: ignore[reportAssignmentType]
        if module is None:
            return None
    return module


def _outer_plan() -> dict[str, ParallelStyle]:
    lookup = partial(RowwiseParallel, input_layouts=Replicate(), output_layouts=Shard(1))
    return {
        "embed": lookup(),
        "positions": lookup(),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
    }


def _block_plan() -> dict[str, ParallelStyle]:
    def whole_rows(others: int) -> PrepareModuleInput:
        untouched = (None,) * others
        return PrepareModuleInput(input_layouts=(Shard(1), *untouched), desired_input_layouts=(Replicate(), *untouched))

    return {
        "attention_norm": SequenceParallel(),
        "attention": whole_rows(others=2),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.query_norm": SequenceParallel(sequence_dim=2, use_local_output=True),  # cut along heads
        "attention.key_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": whole_rows(others=0),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def cross_entropy_by_row(logits_BTV: Tensor, labels_BT: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Summed loss in nats of each sequence, from this peer's columns of the logits. Shape (B,), fp32. Collective.

    Negative labels are left out. Peers hold equal, adjacent ranges of the vocabulary in order of rank."""
    return _SplitCrossEntropy.apply(logits_BTV, labels_BT, group).sum(dim=1)


class _SplitCrossEntropy(torch.autograd.Function):
    """loss = log(sum over V of exp(logit - peak)) + peak - logit[label]; gradient = softmax - one_hot(label)."""

    @staticmethod
    def forward(ctx: Any, logits_BTV: Tensor, labels_BT: Tensor, group: dist.ProcessGroup) -> Tensor:
        first = dist.get_rank(group) * logits_BTV.shape[-1]
        peak_BT = logits_BTV.amax(dim=-1).float()
        dist.all_reduce(peak_BT, dist.ReduceOp.MAX, group)
        weight_BTV = (logits_BTV.float() - peak_BT[..., None]).exp_()
        here_BT = (labels_BT >= first) & (labels_BT < first + logits_BTV.shape[-1])
        column_BT = torch.where(here_BT, labels_BT - first, 0)
        label_logit_BT = logits_BTV.gather(-1, column_BT[..., None])[..., 0].float() * here_BT
        sums_2BT = torch.stack((weight_BTV.sum(dim=-1), label_logit_BT))
        dist.all_reduce(sums_2BT, group=group)
        total_BT, label_logit_BT = sums_2BT
        counted_BT = labels_BT >= 0
        softmax_BTV = weight_BTV.div_(total_BT[..., None])
        ctx.save_for_backward(softmax_BTV, column_BT, here_BT, counted_BT)
        ctx.dtype = logits_BTV.dtype
        return (total_BT.log() + peak_BT - label_logit_BT) * counted_BT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        softmax_BTV, column_BT, here_BT, counted_BT = ctx.saved_tensors
        gradient_BTV = softmax_BTV.scatter_add(-1, column_BT[..., None], -here_BT[..., None].float())
        return gradient_BTV.mul_((gradients[0] * counted_BT)[..., None]).to(ctx.dtype), None, None
