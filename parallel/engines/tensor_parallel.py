"""Tensor parallelism (Shoeybi et al. 2019) with sequence-parallel norms (Korthikanti et al. 2022), on torch's DTensor.

Shapes: B micro batch, T sequence, D d_model, V vocabulary. Peers are the N ranks of the `tensor` axis. They see the
same tokens and together hold one copy of the model.

A module class states how it is split in `tensor_plan`: from the name of a part ("" for the module itself) to a style.

| style      | weight is cut along   | input           | output                   | parts                        |
| ---------- | --------------------- | --------------- | ------------------------ | ---------------------------- |
| lookup     | rows (vocabulary)     | whole           | cut along T              | embed, positions             |
| sequence   | not at all            | cut along T     | cut along T              | norms of the residual stream |
| gather     | (not about weights)   | cut along T     | (makes the input whole)  | attention, mlp               |
| column     | outputs (heads, d_ff) | whole           | cut along heads or d_ff  | query, key, value, gate, up  |
| heads      | not at all            | cut along heads | cut along heads          | norms of queries and keys    |
| row        | inputs (heads, d_ff)  | cut like them   | summed, cut along T      | attention.output, mlp.down   |
| vocabulary | outputs (vocabulary)  | cut along T     | cut along V, never whole | head                         |

In a block and micro batch, the forward pass has two all-gathers and two reduce-scatters of the (B, T, D) activations.
The backward pass has the same, mirrored. The loss exchanges three numbers per token.

With `parallel.async_tensor` the compiler joins an exchange with the products that read or make its data, and the peers
read each other's memory part by part, while they compute. In a block these are all exchanges of the forward pass and
both gathers of the backward pass. Its reduce-scatters add up several products, so they stay as they are.

Peers draw the same random numbers. Dropout acts where activations are cut along T: each peer draws the mask of the
whole sequence and uses its part of it. So each token has a mask of its own, the same for any N.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from parallel.errors import LaunchError


def split_model(model: nn.Module, tensor_mesh: DeviceMesh) -> None:
    """Make the parameters DTensors over the `tensor` axis, in place. On the meta device nothing moves.

    Raises LaunchError if no plan covers a parameter: its gradient would be that of a part of the tokens."""
    tied = model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    for module in list(model.modules()):
        parts = dict(module.named_modules())
        for name, style in getattr(module, "tensor_plan", {}).items():
            if name in parts:
                parallelize_module(parts[name], tensor_mesh, STYLES[style](parts[name]), src_data_rank=None)
                if style == "lookup":
                    parts[name].register_forward_hook(wait_for_output)
    if tied:
        model.get_submodule("head").weight = model.get_parameter("embed.weight")
    uncovered = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if uncovered:
        raise LaunchError(
            f"parallel.tensor ({tensor_mesh.size()}) cannot split {', '.join(uncovered[:3])}: the tensor_plan of its "
            "module class has no entry for it; add one, or set parallel.tensor to 1"
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            forward = partial(dropout_of_part, module, tensor_mesh.get_local_rank(), tensor_mesh.size())
            module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    group = tensor_mesh.get_group()
    model.loss_by_row = partial(cross_entropy_by_row, group=group)  # pyright: ignore[reportArgumentType]


def exchange_beside_products(tensor_mesh: DeviceMesh) -> None:
    """Let later compilations join exchanges with products, and the peers use each other's memory (symmetric memory)."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # torch 2.13 says that the call is not needed, but its compiler joins exchanges of such groups alone.
        warnings.filterwarnings("ignore", "`enable_symm_mem_for_group` is deprecated", FutureWarning)
        enable_symm_mem_for_group(tensor_mesh.get_group().group_name)


class _Waited(torch.autograd.Function):
    """The elements of a collective's result, once they have arrived."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def wait_for_output(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """A forward hook that waits for a collective.

    In torch 2.13 a compiled function returns no gradient for an input whose collective still runs. Its output then does
    not require gradients by that input, and nothing says so. The first block has such an input, the embedding."""
    return _Waited.apply(output) if isinstance(output, AsyncCollectiveTensor) else output  # pyright: ignore[reportReturnType]


def dropout_of_part(dropout: nn.Dropout, rank: int, peers: int, x_BTD: Tensor) -> Tensor:
    """Dropout of this peer's part of the sequence, with its part of the mask that the whole sequence would get."""
    if not dropout.training or dropout.p == 0:
        return x_BTD
    batch, part, width = x_BTD.shape
    factor_BTD = F.dropout(x_BTD.new_ones(batch, part * peers, width), dropout.p)
    return x_BTD * factor_BTD.narrow(1, rank * part, part)


def _gather(module: nn.Module) -> ParallelStyle:
    """Gather the first argument of `forward` along T. Leave the others as they are."""
    others = (None,) * (len(inspect.signature(module.forward).parameters) - 1)
    return PrepareModuleInput(input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others))


STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "lookup": lambda _: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "sequence": lambda _: SequenceParallel(),
    "gather": _gather,
    "column": lambda _: ColwiseParallel(),
    "heads": lambda _: SequenceParallel(sequence_dim=2, use_local_output=True),
    "row": lambda _: RowwiseParallel(output_layouts=Shard(1)),
    "vocabulary": lambda _: ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
}


def cross_entropy_by_row(logits_BTV: Tensor, labels_BT: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Summed loss in nats of each sequence, from this peer's columns of the logits. Shape (B,), fp32. Collective.

    Tokens with negative labels do not count. Peers hold equal, adjacent ranges of the vocabulary in order of rank."""
    return _SplitCrossEntropy.apply(logits_BTV, labels_BT, group).sum(dim=1)


class _SplitCrossEntropy(torch.autograd.Function):
    """loss = log(sum over V of exp(logit - peak)) + peak - logit[label]; gradient = softmax - one_hot(label)."""

    @staticmethod
    def forward(ctx: Any, logits_BTV: Tensor, labels_BT: Tensor, group: dist.ProcessGroup) -> Tensor:
        first = dist.get_rank(group) * logits_BTV.shape[-1]
        peak_BT = logits_BTV.amax(dim=-1).float()
        dist.all_reduce(peak_BT, dist.ReduceOp.MAX, group)
        weight_BTV = (logits_BTV.float() - peak_BT[..., None]).exp_()
        is_local_BT = (labels_BT >= first) & (labels_BT < first + logits_BTV.shape[-1])
        column_BT = torch.where(is_local_BT, labels_BT - first, 0)
        label_logit_BT = logits_BTV.gather(-1, column_BT[..., None])[..., 0].float() * is_local_BT
        sums_2BT = torch.stack((weight_BTV.sum(dim=-1), label_logit_BT))
        dist.all_reduce(sums_2BT, group=group)
        total_BT, label_logit_BT = sums_2BT
        counted_BT = labels_BT >= 0
        softmax_BTV = weight_BTV.div_(total_BT[..., None])
        ctx.save_for_backward(softmax_BTV, column_BT, is_local_BT, counted_BT)
        ctx.dtype = logits_BTV.dtype
        return (total_BT.log() + peak_BT - label_logit_BT) * counted_BT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        softmax_BTV, column_BT, is_local_BT, counted_BT = ctx.saved_tensors
        gradient_BTV = softmax_BTV.scatter_add(-1, column_BT[..., None], -is_local_BT[..., None].float())
        return gradient_BTV.mul_((gradients[0] * counted_BT)[..., None]).to(ctx.dtype), None, None
