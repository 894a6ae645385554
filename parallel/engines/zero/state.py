"""Which elements of which parameter a DeepSpeed ZeRO optimizer keeps on this rank, as flat fragments.

DeepSpeed concatenates parameters into flat fp32 tensors and cuts those. Only this file knows in which attributes of
DeepSpeed 0.19 they are stored. Nothing is gathered: a fragment is a view of the flat tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.engine import CheckpointTensor
from parallel.fragments import FlatFragment
from parallel.optimizer import EngineOptimizer


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + count) of the row-major parameter `name`, stored at `flat[offset : offset + count]`."""

    name: str
    shape: torch.Size
    flat: Tensor
    """Flat fp32 tensor that the inner optimizer updates; the key of its state."""
    group: int
    """Index of the parameter's group in the inner optimizer."""
    offset: int
    start: int
    count: int
    """Number of elements; 0 if this rank keeps none of the parameter."""

    def of(self, flat: Tensor) -> Tensor:
        """A view of this piece in the flat weights, or in a state tensor with the same layout."""
        return flat.detach().narrow(0, self.offset, self.count)

    def fragment(self, flat: Tensor) -> FlatFragment:
        """`of(flat)` as a fragment of the parameter's shape."""
        return FlatFragment(self.of(flat), tuple(self.shape), self.start)


def pieces(optimizer: Any, names: dict[nn.Parameter, str]) -> Iterator[Piece]:
    """One piece for each parameter. `optimizer` is DeepSpeed's wrapper of the inner optimizer."""
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer_Stage3":
            yield from _pieces_of_stage_3(optimizer, names)
        case "DeepSpeedZeroOptimizer":
            yield from _pieces_of_stage_1_and_2(
                optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, names
            )
        case "BF16_Optimizer":  # DeepSpeed's choice for stage 1 in bf16 with fp32 accumulation
            yield from _pieces_of_stage_1_and_2(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, names)
        case other:
            raise TypeError(f"DeepSpeed built a {other}, whose layout is not known here")


def _pieces_of_stage_1_and_2(groups: Any, flats: Any, names: dict[nn.Parameter, str]) -> Iterator[Piece]:
    for index, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is None:
                yield Piece(names[parameter], parameter.shape, flat, index, offset=0, start=0, count=0)
            else:
                stored, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield Piece(names[parameter], parameter.shape, flat, index, stored.start, whole.start, stored.numel)


def _pieces_of_stage_3(optimizer: Any, names: dict[nn.Parameter, str]) -> Iterator[Piece]:
    for parameter, name in names.items():
        sub_group, offset, share = optimizer.grad_position[optimizer.get_param_id(parameter)]
        rank = dist.get_rank(group=optimizer._get_param_partition_group(parameter))
        start = rank * share
        count = max(0, min(share, parameter.ds_numel - start))  # pyright: ignore[reportAttributeAccessIssue]
        shape = torch.Size(parameter.ds_shape)  # pyright: ignore[reportAttributeAccessIssue]
        flat, group = optimizer.fp32_partitioned_groups_flat[sub_group], optimizer.sub_group_to_group_id[sub_group]
        yield Piece(name, shape, flat, group, offset, start if count else 0, count)


def create_state(pieces: list[Piece], inner: EngineOptimizer) -> None:
    """Create the inner optimizer's state of each flat tensor, as `EngineOptimizer.create_state` does of parameters.

    Between steps DeepSpeed takes the flat tensors out of the inner optimizer's groups, so that one would miss them."""
    for flat, group in {id(piece.flat): (piece.flat, piece.group) for piece in pieces}.values():
        inner.state[flat] = inner.new_state(flat.detach(), inner.param_groups[group])


def state_of(pieces: list[Piece], inner: EngineOptimizer) -> dict[str, CheckpointTensor]:
    """Views of the fp32 weights and of the optimizer state, under the names that every engine uses.

    A state tensor as long as the flat weights is cut like them. A tensor without dimension is shown whole."""
    state: dict[str, CheckpointTensor] = {}
    for piece in pieces:
        state[f"model.{piece.name}"] = piece.fragment(piece.flat)
        for key, value in inner.state[piece.flat].items():
            assert value.dim() == 0 or value.shape == piece.flat.shape, (key, value.shape, piece.flat.shape)
            state[f"optim.{piece.name}.{key}"] = value if value.dim() == 0 else piece.fragment(value)
    return state


def refresh_working_weights(optimizer: Any) -> None:
    """Copy the fp32 weights into the weights that the forward pass uses. Collective."""
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer_Stage3":
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()
