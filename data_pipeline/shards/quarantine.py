"""The quarantine: blocks that stay unreadable or damaged, and the rows that replace theirs."""

import logging

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.shards.shard_file import RowNumbers

log = logging.getLogger(__name__)


class Quarantine:
    """The quarantined blocks of one split. Their rows are replaced by rows of the next good block.

    The replacement depends on the quarantined blocks alone, so it is the same on all ranks."""

    def __init__(self, rows: int, block_rows: int, allowed: bool) -> None:
        self._rows, self._block_rows, self._allowed = rows, block_rows, allowed
        self.blocks = -(-rows // block_rows)
        self.reasons: dict[int, str] = {}
        """Quarantined block -> error."""

    def add(self, block: int, where: str, address: str, error: DataError) -> None:
        """Quarantines a block. Raises the error if that is not allowed, or if no good block remains."""
        if not self._allowed:
            raise type(error)(
                f"{where} of {address}: {error}. Restore the file, give data.sources a mirror, or set "
                f"data.on_bad_block to quarantine to train without the block"
            )
        self.reasons[block] = str(error)
        log.warning("quarantined %s of %s: %s", where, address, error)
        if len(self.reasons) == self.blocks:
            raise DataError(f"every block of {address} is quarantined; restore the data set")

    def replace(self, rows: RowNumbers) -> RowNumbers:
        """The rows, with those of quarantined blocks replaced by rows of the next good block."""
        if not self.reasons:
            return rows
        out = rows.copy()
        for bad in np.intersect1d(rows // self._block_rows, list(self.reasons)).tolist():
            good = (bad + 1) % self.blocks
            while good in self.reasons:
                good = (good + 1) % self.blocks
            in_bad = rows // self._block_rows == bad
            good_rows = min(self._block_rows, self._rows - good * self._block_rows)
            out[in_bad] = good * self._block_rows + rows[in_bad] % self._block_rows % good_rows
        return out
