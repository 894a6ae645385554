"""Which elements of which parameter a DeepSpeed ZeRO optimizer keeps on this rank, as flat fragments.

DeepSpeed concatenates parameters into flat fp32 tensors and cuts those. This file knows, for DeepSpeed 0.19, in which
attributes they lie; nothing else does. Nothing is gathered: a fragment is a view of the flat tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.engine import CheckpointTensor
from parallel.fragments import FlatFragment


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + count) of the row-major parameter `name`, at `flat[offset : offset + count]`."""

    name: str
    shape: torch.Size
    flat: Tensor
    """An fp32 tensor that the inner torch optimizer updates; it keys the optimizer's state."""
    offset: int
    start: int
    count: int
    """0 if this rank keeps nothing of the parameter."""

    def of(self, flat: Tensor) -> Tensor:
        """This piece of the fp32 weights, or of a moment with the same layout."""
        return flat.detach().narrow(0, self.offset, self.count)


def pieces(optimizer: Any, names: dict[nn.Parameter, str]) -> Iterator[Piece]:
    """One for each parameter. `optimizer` is what DeepSpeed made of the torch optimizer."""
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer_Stage3":
            yield from _pieces_of_stage_3(optimizer, names)
        case "DeepSpeedZeroOptimizer":
            yield from _pieces_of_stage_1_and_2(
                optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, names
            )
        case "BF16_Optimizer":  # what DeepSpeed takes for stage 1 in bf16 with fp32 accumulation
            yield from _pieces_of_stage_1_and_2(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, names)
        case other:
            raise TypeError(f"DeepSpeed built a {other}, whose layout is not known here")


def _pieces_of_stage_1_and_2(groups: Any, flats: Any, names: dict[nn.Parameter, str]) -> Iterator[Piece]:
    for group, flat in zip(groups, flats, strict=True):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is None:
                yield Piece(names[parameter], parameter.shape, flat, offset=0, start=0, count=0)
            else:
                here, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield Piece(names[parameter], parameter.shape, flat, here.start, whole.start, here.numel)


def _pieces_of_stage_3(optimizer: Any, names: dict[nn.Parameter, str]) -> Iterator[Piece]:
    for parameter, name in names.items():
        group, offset, share = optimizer.grad_position[optimizer.get_param_id(parameter)]
        rank = dist.get_rank(group=optimizer._get_param_partition_group(parameter))
        start = rank * share
        count = max(0, min(share, parameter.ds_numel - start))  # pyright: ignore[reportAttributeAccessIssue]
        shape = torch.Size(parameter.ds_shape)  # pyright: ignore[reportAttributeAccessIssue]
        yield Piece(name, shape, optimizer.fp32_partitioned_groups_flat[group], offset, start if count else 0, count)


def state_of(pieces: list[Piece], inner: Optimizer) -> dict[str, CheckpointTensor]:
    """Views of the fp32 weights and moments, under the names that every engine uses."""
    state: dict[str, CheckpointTensor] = {}
    for piece in pieces:
        kept = inner.state[piece.flat]
        state[f"model.{piece.name}"] = FlatFragment(piece.of(piece.flat), tuple(piece.shape), piece.start)
        for key in ("exp_avg", "exp_avg_sq"):
            fragment = FlatFragment(piece.of(kept[key]), tuple(piece.shape), piece.start)
            state[f"optim.{piece.name}.{key}"] = fragment
        state[f"optim.{piece.name}.step"] = kept["step"]
    return state


def refresh_working_weights(optimizer: Any) -> None:
    """Make the weights that the forward pass uses out of the fp32 ones. Collective."""
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer_Stage3":
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()
