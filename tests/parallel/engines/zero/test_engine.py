import sys
from types import SimpleNamespace

import pytest
import torch

from parallel.bootstrap import Runtime
from parallel.engines.zero.engine import build_zero
from parallel.engines.zero.setup import deepspeed_config, import_deepspeed
from parallel.environ import World
from parallel.errors import LaunchError
from parallel.layout import Layout
from tests.parallel.engine_trial import config_of, trainable

ALONE = Runtime(World(0, 1, 0, 1, "", 0, "single"), Layout(1, 1, 1), torch.device("cpu"), None, None)


def test_without_deepspeed_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        LaunchError, match=r"zero2 needs DeepSpeed 0.19, which cannot be imported .*pip install .*fsdp2"
    ):
        build_zero(config_of(engine="zero2"), ALONE, trainable())


def test_another_version_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(__version__="0.17.2", accelerator=SimpleNamespace(get_accelerator=None))
    monkeypatch.setitem(sys.modules, "deepspeed", other)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", other.accelerator)
    with pytest.raises(LaunchError, match=r"zero3 needs DeepSpeed 0.19, but 0.17.2 is installed; .*pip install"):
        build_zero(config_of(engine="zero3"), ALONE, trainable())


@pytest.mark.filterwarnings("ignore")
def test_fp16_without_deepspeeds_support_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's answer depends on the processor, so the test gives it."""
    accelerator = pytest.importorskip("deepspeed.accelerator").get_accelerator()
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda: False)
    with pytest.raises(LaunchError, match=r"fp16 is not supported by DeepSpeed on this cpu; set parallel.precision to"):
        build_zero(config_of(engine="zero2", precision="fp16"), ALONE, trainable())


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_does_not_try_out_its_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """That starts a compiler, which prints `ld: cannot find -laio` on most machines."""
    deepspeed = pytest.importorskip("deepspeed")
    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", lambda: pytest.fail("DeepSpeed tried its extensions"))
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(deepspeed.comm, "is_initialized", lambda: True)
    import_deepspeed(config_of(engine="zero2"), torch.device("cpu"))
    assert not deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]


@pytest.mark.parametrize(
    ("engine", "device", "overlap"), [("zero1", "cuda", True), ("zero2", "cuda", True), ("zero1", "cpu", None)]
)
def test_reductions_overlap_with_the_backward_pass_on_a_device(engine: str, device: str, overlap: bool | None) -> None:
    """DeepSpeed overlaps them by itself in stage 3 alone. On a CPU there is no stream to overlap on."""
    settings = deepspeed_config(config_of(engine=engine), torch.device(device))
    assert settings["zero_optimization"].get("overlap_comm") is overlap
