"""One exit code for a group of ranks."""

import pytest

from launch.supervise.agent import outcome


@pytest.mark.parametrize(
    ("codes", "code"),
    [([], 0), ([0, 0], 0), ([75, 75], 75), ([75, 1], 75), ([-9, 1], 1), ([1, 2], 2), ([2, 75], 2), ([-15, 0], 1)],
)
def test_for_good_outweighs_stopped_outweighs_failed(codes, code):
    assert outcome(codes) == code
