import sys
from typing import Any

import pytest
import torch
from torch import nn

from parallel.bootstrap import start
from parallel.engine import Trainable
from parallel.engines.fp8 import in_fp8, require_equal_parts, require_fp8
from parallel.environ import World
from parallel.errors import LaunchError
from tests.parallel.engine_trial import config_of, trainable
from tests.parallel.fp8_trial import losses, losses_in_bf16
from tests.parallel.ranks import run_ranks

ALONE = World(0, 1, 0, 1, "", 0, "single")
ENGINES = {
    f"{engine}, {scaling}": {"engine": engine, "fp8_scaling": scaling}
    for engine in ("ddp", "fsdp2")
    for scaling in ("rowwise", "tensorwise")
}


def converted(**settings: Any) -> Trainable:
    """The tiny GPT with its blocks in fp8."""
    return in_fp8(trainable(), config_of(precision="fp8", compile=True, **settings))


def test_only_the_linear_layers_of_blocks_are_converted() -> None:
    before, after = trainable().build(), converted().build()
    linear = {name for name, module in before.named_modules() if isinstance(module, nn.Linear)}
    found = {name for name, module in after.named_modules() if type(module).__name__ == "Float8Linear"}
    assert found == linear - {"head"}
    assert len(found) == 3 * 7


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_names_shapes_and_types_of_parameters_are_those_of_any_precision(scaling: str) -> None:
    def parameters(model: nn.Module) -> list[tuple[object, ...]]:
        return [(name, p.shape, p.dtype, type(p)) for name, p in model.named_parameters()]

    with torch.device("meta"):
        assert parameters(converted(engine="ddp", fp8_scaling=scaling).build()) == parameters(trainable().build())


def test_each_scaling_trains_close_to_bf16_but_not_equally() -> None:
    narrow = losses_in_bf16({"engine": "single"})
    rows, tensors = (losses({"engine": "single", "fp8_scaling": scaling}) for scaling in ("rowwise", "tensorwise"))
    for narrower in (rows, tensors):
        assert narrower == pytest.approx(narrow, rel=4e-3)
        assert narrower != pytest.approx(narrow, rel=1e-6)
    assert rows != tensors


def test_a_large_value_costs_only_its_own_row_precision() -> None:
    """The reason for one scale for each row. Errors of a product whose input has one large value, against fp32."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 64), torch.randn(64, 64) / 8
    x[0, 0] = 1e6
    exact = x @ weight.T

    def error(scaling: str) -> float:
        model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Sequential(nn.Linear(64, 64, bias=False))})})
        made = Trainable(lambda: model, trainable().initial_value, trainable().optimizer)
        layer = in_fp8(made, config_of(precision="fp8", compile=True, fp8_scaling=scaling), emulate=True).build()
        (linear,) = layer.get_submodule("layers.0").children()
        with torch.no_grad():
            linear.get_parameter("weight").copy_(weight)
            return float((linear(x) - exact)[1:].norm() / exact[1:].norm())

    assert error("rowwise") < 0.05 < 0.5 < error("tensorwise")


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_recomputed_blocks_train_equally_in_fp8(scaling: str) -> None:
    settings = {"engine": "single", "fp8_scaling": scaling}
    kept = losses(settings, steps=3)
    for choice in ("selective", "full"):
        assert losses({**settings, "activation_checkpointing": choice}, steps=3) == kept


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    """The results of two ranks, which are started once."""
    return run_ranks("tests/parallel/fp8_trial.py", "all_on_two", 2, ENGINES)


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_two_ranks_train_close_to_one_process(both: list[dict[str, Any]], scaling: str) -> None:
    """Not equally: columns of activations, or whole ones, are scaled by the largest value of a rank's own tokens."""
    alone = losses({"engine": "single", "fp8_scaling": scaling}, steps=5)
    for engine in ("ddp", "fsdp2"):
        assert both[0]["losses"][f"{engine}, {scaling}"] == pytest.approx(alone, rel=1e-2)


def test_two_ranks_train_equally_with_either_engine_if_both_cast_from_bf16(both: list[dict[str, Any]]) -> None:
    """The first steps: a sum in another order may round a value to the next one in fp8."""
    found = both[0]["losses"]
    assert found["fsdp2, rowwise"][:3] == pytest.approx(found["ddp, rowwise"][:3], rel=1e-5)


def test_blocks_that_gather_fp8_can_be_compiled(both: list[dict[str, Any]]) -> None:
    assert both[0]["compiled"] == pytest.approx(both[0]["losses"]["fsdp2, tensorwise"][:2], rel=1e-5)


def test_the_state_of_an_engine_that_gathers_fp8_is_plain_fp32_and_can_be_filled_in_place(
    both: list[dict[str, Any]],
) -> None:
    for rank in both:
        assert rank["state"] == {"types": ["Tensor"], "dtypes": ["torch.float32"], "reloaded": True}


def test_matrices_that_the_ranks_do_not_cut_evenly_are_refused() -> None:
    model = trainable().build()
    require_equal_parts(model, 32)
    with pytest.raises(
        LaunchError, match=r"needs matrices that 64 ranks .* but .*key.weight has 32 rows; set parallel"
    ):
        require_equal_parts(model, 64)


def test_a_rank_on_a_cpu_is_refused_at_start_up() -> None:
    with pytest.raises(LaunchError, match=r"fp8 needs a CUDA device of .* 9.0 or more .* has cpu; set .* to bf16"):
        start(config_of(engine="single", precision="fp8", compile=True), ALONE)


def test_an_older_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(LaunchError, match=r"but this rank has NVIDIA A100 \(8.0\); set parallel.precision to bf16"):
        require_fp8(torch.device("cuda", 0))


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    require_fp8(torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(LaunchError, match=r"fp8 needs torchao, .* imported .*pip install 'keepstep\[fp8\]'.* to bf16"):
        require_fp8(torch.device("cuda", 0))
