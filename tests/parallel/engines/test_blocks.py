"""B sequences of T tokens through a tiny GPT, with and without recomputation."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from parallel.config import ParallelConfig
from parallel.engines.blocks import _keep_or_recompute, apply_to_blocks
from parallel.engines.initial import fill_model
from tests.parallel.engine_trial import LOSS, config_of, runtime_of, trainable
from tests.parallel.engine_trial import micro_batches as batches_of


class ProductCounter(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def gradients(dropout: float = 0.0, **settings: Any) -> list[torch.Tensor]:
    """The gradients of one pass over one micro batch."""
    maker = trainable(dropout=dropout)
    model = maker.build()
    fill_model(model, maker.initial_value)
    apply_to_blocks(model, ParallelConfig(**settings))
    batch = batches_of(0, runtime_of(config_of(engine="single")), number=1)[0][0]
    torch.manual_seed(0)
    LOSS(model, batch).objective.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def products(**settings: Any) -> int:
    """Number of matrix products of one pass over one micro batch."""
    with ProductCounter() as counter:
        gradients(**settings)
    return counter.products


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputation_keeps_the_bits_of_gradients(kind: str, dropout: float) -> None:
    kept = gradients(dropout)
    recomputed = gradients(dropout, activation_checkpointing=kind)
    assert len(kept) == len(recomputed) > 0
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def test_full_recomputes_every_product_and_selective_none() -> None:
    plain = products()
    full = products(activation_checkpointing="full")
    selective = products(activation_checkpointing="selective")
    second = products(activation_checkpointing="full", checkpoint_every_k_blocks=2)
    assert selective == plain < second < full
    assert (full - plain) * 2 == (second - plain) * 3  # 3 blocks against 2 of them


def test_selective_keeps_the_result_of_a_function_compiled_on_its_own() -> None:
    """As FlexAttention is on CUDA in blocks that are not compiled. The function here counts its runs.

    Compiled without vector instructions (`simdlen`), which torch's compiler cannot use under ATEN_CPU_CAPABILITY."""
    runs: list[int] = []

    @torch.library.custom_op("keepstep_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.cos()

    counted.register_fake(torch.empty_like)
    counted.register_autograd(lambda _, grad: grad)

    def runs_of_a_pass(**options: Any) -> int:
        torch.compiler.reset()
        compiled = torch.compile(lambda x: counted(x) * 2, options={**options, "cpp.simdlen": 1})
        contexts = partial(create_selective_checkpoint_contexts, _keep_or_recompute)
        x = torch.ones(4, requires_grad=True)
        runs.clear()
        checkpoint(lambda x: compiled(x).sin().sin(), x, use_reentrant=False, context_fn=contexts).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
        return len(runs)

    assert runs_of_a_pass(wrap_inductor_compiled_regions=True) == 1
    assert runs_of_a_pass() == 2


def test_parameter_names_stay_plain() -> None:
    model = trainable().build()
    before = [name for name, _ in model.named_parameters()]
    apply_to_blocks(model, ParallelConfig(activation_checkpointing="full"))
    assert [name for name, _ in model.named_parameters()] == before


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_a_smaller_budget_keeps_fewer_bytes_and_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    # This backend has the partitioner, which decides, but generates no code, so it compiles quickly.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))

    def kept_bytes(budget: float) -> tuple[int, list[torch.Tensor]]:
        torch.compiler.reset()
        kept: dict[int, int] = {}

        def count(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            found = gradients(compile=True, activation_memory_budget=budget)
        return sum(kept.values()), found

    (everything, whole), (half, same), (nothing, _) = (kept_bytes(budget) for budget in (1.0, 0.5, 0.0))
    assert nothing < half < everything
    torch.testing.assert_close(same, whole)
