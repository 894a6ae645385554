"""The tokenizer that a checkpoint carries: what an import brings along, and whether data were built with it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import xxhash

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.tokenizer import (
    HUGGING_FACE_FILE,
    SENTENCEPIECE_FILE,
    Tokenizer,
    load_tokenizer,
    tokenizer_files,
)
from train.errors import CheckpointError
from train.export.hard_texts import HARD_TEXTS


@dataclass(frozen=True)
class Carried:
    """A tokenizer's files by name, and the hash of the ids that it gives. Empty if the source has no tokenizer."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    ids_hash: str = ""


def carried_tokenizer(given: Mapping[str, bytes], folder: Path, vocab_size: int, notes: list[str]) -> Carried:
    """The given files of a tokenizer, or else those that lie beside the weights in `folder`.

    If they cannot be used, the reason is added to `notes`."""
    if not given and not any((folder / name).is_file() for name in (SENTENCEPIECE_FILE, HUGGING_FACE_FILE)):
        return Carried()
    try:
        files = given or tokenizer_files(folder)
        with TemporaryDirectory(prefix="keepstep-tokenizer-") as copy:
            for name, content in files.items():
                (Path(copy) / name).write_bytes(content)
            tokenizer = load_tokenizer(copy)
            if tokenizer.vocab_size > vocab_size:
                raise DataError(
                    f"it has {tokenizer.vocab_size} tokens, more than the model's vocabulary ({vocab_size})"
                )
            return Carried(files, ids_hash(tokenizer))
    except (DataError, OSError) as error:
        notes.append(f"the checkpoint does not carry the tokenizer of {folder}, so `generate` will not work: {error}")
        return Carried()


def ids_hash(tokenizer: Tokenizer) -> str:
    """Hash of the ids of texts on which tokenizers that look alike differ. Control tokens are not among them."""
    return xxhash.xxh3_64_hexdigest(json.dumps(tokenizer.encode_batch(HARD_TEXTS)).encode())


def check_tokenizer(wanted: str, data_tokenizer: Path, checkpoint: str) -> None:
    """CheckpointError unless the tokenizer in `data_tokenizer` gives the ids whose hash is `wanted`."""
    if ids_hash(load_tokenizer(data_tokenizer)) != wanted:
        raise CheckpointError(
            f"the data were built with another tokenizer than that of {checkpoint} ({data_tokenizer}), so their ids "
            "mean other tokens; build them with the tokenizer of the weights"
        )
