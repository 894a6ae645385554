"""A tokenizer and a data set that many tests use."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from data_pipeline.shards.manifest import Manifest
from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from tests.data_pipeline.sets import build, documents


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece tokenizer of 320 tokens. Read-only."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_sentencepiece(documents(200), folder, vocab_size=320)
    return folder


@dataclass(frozen=True)
class Built:
    """A data set, and the texts that it was built from."""

    path: Path
    manifest: Manifest
    texts: list[str]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Built:
    """300 documents in rows of 32 tokens, in blocks of 4 rows and several shards. Read-only."""
    texts = documents(300)
    path = tmp_path_factory.mktemp("built") / "set"
    return Built(path, build(path, texts, tokenizer, shard_bytes=16_000, validation_share=0.05), texts)
