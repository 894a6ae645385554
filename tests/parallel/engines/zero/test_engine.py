import sys
from types import SimpleNamespace

import pytest
import torch

from parallel.bootstrap import Runtime
from parallel.engines.zero.engine import build_zero
from parallel.environ import World
from parallel.errors import LaunchError
from parallel.layout import Layout
from tests.parallel.engine_trial import config_of, trainable

ALONE = Runtime(World(0, 1, 0, 1, "", 0, "single"), Layout(1, 1, 1), torch.device("cpu"), None, None)


def test_without_deepspeed_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.skipif(torch.accelerator.is_available(), reason="DeepSpeed supports fp16 on this machine's accelerator")
@pytest.mark.filterwarnings("ignore")
def test_fp16_where_deepspeed_lacks_it_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"fp16 is not supported by DeepSpeed on this cpu; set parallel.precision to"):
        build_zero(config_of(engine="zero2", precision="fp16"), ALONE, trainable())
