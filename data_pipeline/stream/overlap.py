"""Checks that no validation document of one source is trained on in another.

The split of a document depends on its hash and on a threshold: the validation share. So sources with equal thresholds
agree about every document. If thresholds differ, or a source has its own validation files, the hashes are compared."""

import logging
import math
from collections.abc import Sequence

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.document_hashes import read_hashes
from data_pipeline.shards.manifest import TRAIN, VALIDATION, Manifest

log = logging.getLogger(__name__)


def check_splits(datasets: Sequence[DataSet]) -> None:
    """DataError if a source trains on a document that is in the validation split of another source."""
    for number, validation in enumerate(datasets):
        for other, training in enumerate(datasets):
            if not _may_overlap(validation.manifest, training.manifest):
                continue
            names = f"data.sources[{number}] {validation.address}", f"data.sources[{other}] {training.address}"
            if not (validation.manifest.hashes and training.manifest.hashes):
                log.warning(
                    "cannot check whether validation documents of %s are trained on in %s: their validation shares "
                    "differ, and an earlier version built one of them; build both again to check",
                    *names,
                )
            elif shared := _shared(validation, training):
                raise DataError(
                    f"{shared:,} validation documents of {names[0]} are trained on in {names[1]}; "
                    f"{_remedy(validation.manifest, training.manifest)}"
                )


def _may_overlap(validation: Manifest, training: Manifest) -> bool:
    """Whether documents of the validation split can be in the other training split."""
    if validation.fingerprint == training.fingerprint or not validation.splits[VALIDATION].documents:
        return False
    if not (validation.hashes and training.hashes):
        return _share(validation) != _share(training)
    if validation.validation_below is None or training.validation_below is None:
        return True
    return training.validation_below < validation.validation_below


def _share(manifest: Manifest) -> float | None:
    return manifest.options.get("validation_share", manifest.options.get("held_out_share"))


def _shared(validation: DataSet, training: DataSet) -> int:
    """The number of documents that are in both splits."""
    chosen = read_hashes(validation, VALIDATION, 2**64)
    if not len(chosen):
        return 0
    trained = read_hashes(training, TRAIN, int(chosen[-1]) + 1)
    return len(np.intersect1d(chosen, trained, assume_unique=True))


def _remedy(validation: Manifest, training: Manifest) -> str:
    if validation.validation_below is None or training.validation_below is None:
        return "build both with the same --validation files, which removes their documents from the training split"
    share = math.ceil(validation.validation_below / 2**64 * 10_000) / 10_000
    return f"build both with the same share: --validation-share {share:g}"
