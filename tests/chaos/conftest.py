from pathlib import Path

import pytest

from tests.chaos.harness import Run, build_data
from train.exit_codes import FINISHED


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set and the folders of all runs of the session."""
    root = tmp_path_factory.mktemp("chaos")
    build_data(root)
    return root


@pytest.fixture(scope="session")
def undisturbed(root: Path) -> Run:
    """The run without faults. Every run with faults must have the same result."""
    run = Run(root, "undisturbed")
    assert run.train() == FINISHED, run.output
    return run
