"""One Slurm cluster of three machines for all quick tests of this folder."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, why_no_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_no_cluster()
    if reason and "CI" not in os.environ:
        pytest.skip(f"no Slurm cluster here: {reason}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=3).up()
    yield cluster
    cluster.down()
