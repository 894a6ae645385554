"""All tests start alike on every machine: nothing of the shell that started them, and no time limits of hypothesis."""

import contextlib
import math
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from launch import terminal
from train.health.stop import NOHUP, SIGNALS

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

FOREIGN = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "MASTER_", "GLOO_", "NCCL_")
"""Variables of a launcher. The tests may themselves run in a job, which would make each command a rank of it."""
RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", NOHUP}
OUTPUT = {"FORCE_COLOR", "NO_COLOR", "COLUMNS"}

for name in [name for name in os.environ if name.startswith(FOREIGN) or name in RANK | OUTPUT]:
    if name != "SLURM_CONF":  # where the machine's own Slurm is
        del os.environ[name]
os.environ |= {"LC_ALL": "C.UTF-8", "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
os.umask(0o022)

for number in SIGNALS:
    if signal.getsignal(number) == signal.SIG_IGN:  # by `nohup` or `&`: commands that the tests start would inherit it
        signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def no_progress_lines() -> Iterator[None]:
    """Commands show no progress, which only slow machines would see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "PLAIN_SECONDS", math.inf)
        yield


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Undo what happens to the environment inside."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def environment_of_a_test() -> Iterator[None]:
    """A rank that runs inside a test sets variables for gloo, NCCL and DeepSpeed, which the next test must not see."""
    with environment_kept():
        yield


@pytest.fixture(autouse=True, scope="module")
def environment_of_a_module() -> Iterator[None]:
    """The same for what a module's fixtures set."""
    with environment_kept():
        yield
