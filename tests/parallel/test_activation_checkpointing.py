"""B sequences of T tokens through a tiny GPT, with and without recomputation."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.activation_checkpointing import apply_to_blocks
from parallel.config import ParallelConfig
from tests.parallel.engine_trial import LOSS, config_of, runtime_of, trainable
from tests.parallel.engine_trial import micro_batches as batches_of


class ProductCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def gradients(dropout: float = 0.0, **settings: Any) -> tuple[list[torch.Tensor], int]:
    """Of one pass over one micro batch, and the matrix products that it took."""
    maker = trainable(dropout=dropout)
    model = maker.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(maker.initial_value(name, parameter.shape))
    apply_to_blocks(model, ParallelConfig(**settings))
    batch = batches_of(0, runtime_of(config_of(engine="single")), number=1)[0][0]
    torch.manual_seed(0)
    with ProductCounter() as counter:
        LOSS(model, batch).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], counter.products


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_are_the_same_bits_with_and_without(kind: str, dropout: float) -> None:
    kept, _ = gradients(dropout)
    recomputed, _ = gradients(dropout, activation_checkpointing=kind)
    assert len(kept) == len(recomputed) > 0
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def test_full_computes_every_product_again_and_selective_none() -> None:
    _, plain = gradients()
    _, full = gradients(activation_checkpointing="full")
    _, selective = gradients(activation_checkpointing="selective")
    _, second = gradients(activation_checkpointing="full", checkpoint_every_k_blocks=2)
    assert selective == plain < second < full
    assert (full - plain) * 2 == (second - plain) * 3  # 3 blocks against 2 of them


def test_names_of_parameters_stay_plain() -> None:
    model = trainable().build()
    before = [name for name, _ in model.named_parameters()]
    apply_to_blocks(model, ParallelConfig(activation_checkpointing="full"))
    assert [name for name, _ in model.named_parameters()] == before
