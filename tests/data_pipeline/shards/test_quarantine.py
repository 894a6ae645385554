import numpy as np
import pytest

from data_pipeline.errors import DataError, StorageError
from data_pipeline.shards.quarantine import Quarantine


def quarantined(*blocks: int) -> Quarantine:
    """A quarantine of some of the 3 blocks that 10 rows in blocks of 4 have."""
    quarantine = Quarantine(10, 4, allowed=True)
    for block in blocks:
        quarantine.add(block, f"block {block}", "set", DataError("damaged"))
    return quarantine


def test_without_quarantined_blocks_rows_are_unchanged() -> None:
    assert quarantined().replace(np.arange(10)).tolist() == list(range(10))


def test_the_rows_of_a_quarantined_block_become_rows_of_the_next_good_one() -> None:
    assert quarantined(0).replace(np.arange(10)).tolist() == [4, 5, 6, 7, 4, 5, 6, 7, 8, 9]
    assert quarantined(0, 1).replace(np.array([3, 0, 5])).tolist() == [9, 8, 9]  # the last block has 2 rows
    assert quarantined(2).replace(np.array([8, 9])).tolist() == [0, 1]


def test_a_bad_block_is_an_error_of_the_same_kind_if_quarantine_is_not_allowed() -> None:
    with pytest.raises(StorageError, match=r"block 1 of set: cannot read it\. Restore the file, give data\.sources"):
        Quarantine(10, 4, allowed=False).add(1, "block 1", "set", StorageError("cannot read it"))


def test_the_last_good_block_is_not_quarantined() -> None:
    with pytest.raises(DataError, match=r"every block of set is quarantined"):
        quarantined(0, 1, 2)
