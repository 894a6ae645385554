"""All tests start alike on every machine: nothing of the shell that started them, and no time limits of hypothesis."""

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

FOREIGN = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "MASTER_")
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all tests of a file, which may share ranks, and all of tests/slurm, which share a cluster."""
    for item in items:
        folder = item.path.parent
        item.add_marker(pytest.mark.xdist_group("slurm" if folder.name == "slurm" else str(item.path)))


@pytest.fixture(autouse=True, scope="session")
def no_progress_lines() -> Iterator[None]:
    """Commands show no progress, which only slow machines would see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "PLAIN_SECONDS", math.inf)
        yield
