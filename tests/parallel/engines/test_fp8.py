import sys

import pytest
import torch
from torch import nn

from parallel.bootstrap import start
from parallel.engines.fp8 import build_in_fp8, require_fp8
from parallel.environ import World
from parallel.errors import LaunchError
from tests.parallel.engine_trial import config_of, trainable
from tests.parallel.fp8_trial import emulated, losses
from tests.parallel.ranks import run_ranks

ALONE = World(0, 1, 0, 1, "", 0, "single")
WRAPPED = {name: {"engine": name} for name in ("ddp", "fsdp2")}


def test_only_the_linear_layers_of_blocks_are_converted() -> None:
    before, after = trainable().build(), build_in_fp8(trainable().build)
    linear = {name for name, module in before.named_modules() if isinstance(module, nn.Linear)}
    converted = {name for name, module in after.named_modules() if type(module).__name__ == "Float8Linear"}
    assert converted == linear - {"head"}
    assert len(converted) == 3 * 7


def test_names_shapes_and_types_of_parameters_are_those_of_any_precision() -> None:
    def parameters(model: nn.Module) -> list[tuple[object, ...]]:
        return [(name, p.shape, p.dtype, type(p)) for name, p in model.named_parameters()]

    with torch.device("meta"):
        assert parameters(build_in_fp8(trainable().build)) == parameters(trainable().build())


def test_fp8_trains_close_to_bf16_but_not_equally() -> None:
    narrow, narrower = losses({"engine": "single"}, trainable()), losses({"engine": "single"}, emulated())
    assert narrower == pytest.approx(narrow, rel=4e-3)
    assert narrower != pytest.approx(narrow, rel=1e-6)


def test_recomputed_blocks_train_equally_in_fp8() -> None:
    kept = losses({"engine": "single"}, emulated(), steps=3)
    for choice in ("selective", "full"):
        assert losses({"engine": "single", "activation_checkpointing": choice}, emulated(), steps=3) == kept


def test_the_engines_train_equally_in_fp8() -> None:
    alone = losses({"engine": "single"}, emulated())
    wrapped = run_ranks("tests/parallel/fp8_trial.py", "emulated_losses", 1, WRAPPED)[0]
    assert wrapped["ddp"] == pytest.approx(alone, rel=1e-5)
    assert wrapped["fsdp2"] == pytest.approx(alone, rel=1e-5)


def test_two_ranks_train_equally_in_fp8_and_close_to_one_process() -> None:
    """One process gives other results: activations are scaled by the largest value of a rank's own rows. Also, a sum in
    another order may round a value to the next one in fp8, which becomes visible after a few steps."""
    alone = losses({"engine": "single"}, emulated())
    both = run_ranks("tests/parallel/fp8_trial.py", "emulated_losses", 2, WRAPPED)[0]
    assert both["fsdp2"][:3] == pytest.approx(both["ddp"][:3], rel=1e-5)
    for engine in WRAPPED:
        assert both[engine] == pytest.approx(alone, rel=1e-2)


def test_a_rank_on_a_cpu_is_refused_at_start_up() -> None:
    with pytest.raises(LaunchError, match=r"fp8 needs a CUDA device of .* 9.0 or more .* has cpu; set .* to bf16"):
        start(config_of(engine="single", precision="fp8"), ALONE)


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
