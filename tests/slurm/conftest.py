"""One Slurm cluster, and one run without faults, for all tests of this folder."""

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, why_no_cluster
from tests.slurm.lab import Lab


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_no_cluster()
    if reason and "CI" not in os.environ:
        pytest.skip(f"no Slurm cluster can be started here: {reason}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=3).up()
    yield cluster
    cluster.down()


@pytest.fixture(scope="session")
def lab(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(cluster, tmp_path_factory.mktemp("lab"))
