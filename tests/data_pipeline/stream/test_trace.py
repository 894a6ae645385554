import json
import shutil
from itertools import islice
from pathlib import Path

import pytest

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.shards.shard_file import HEADER_BYTES
from data_pipeline.stream.stream import open_stream
from data_pipeline.stream.trace import TracedSample, trace
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.sets import config

G = 8


def traced(chosen: DataConfig, step: int, seq_len: int = 32, **options: object) -> list[TracedSample]:
    return trace(chosen, seq_len=seq_len, global_batch_size=G, step=step, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seq_len", [32, 8])
def test_the_traced_documents_are_the_tokens_that_the_step_used(built: Built, seq_len: int) -> None:
    tokenizer = load_tokenizer(built.path / "tokenizer")
    with open_stream(config(built.path), seq_len=seq_len) as stream:
        steps = stream.steps(first_step=5, global_batch_size=G, micro_batch_size=1, rank=0, world_size=1)
        batches = next(steps)
    samples = traced(config(built.path), 5, seq_len)
    assert [sample.sample for sample in samples] == list(range(5 * G, 6 * G))
    for sample, batch in zip(samples, batches, strict=True):
        text = "".join(document.text for document in sample.documents)
        tokens = [token for token in batch.tokens_BT[0].tolist() if token != tokenizer.end_of_document]
        assert text == tokenizer.decode(tokens)


def test_every_document_has_its_file_its_number_and_its_text(built: Built) -> None:
    for sample in traced(config(built.path), 3):
        for document in sample.documents:
            assert document.file == str(built.path.with_name("set.jsonl"))
            original = built.texts[document.number]
            assert document.text in original
            if document.first_token == 0:
                assert original.startswith(document.text)


def test_one_sample_can_be_traced(built: Built) -> None:
    assert traced(config(built.path), 3, positions=[4]) == traced(config(built.path), 3)[4:5]
    with pytest.raises(DataError, match=r"--sample must be 0 to 7, a position in the global batch, not \[8\]"):
        traced(config(built.path), 3, positions=[8])


def test_the_weights_that_the_run_had_are_used(built: Built, tmp_path: Path) -> None:
    shutil.copytree(built.path, tmp_path / "again")
    before = config(built.path, tmp_path / "again", weights=[1, 1])
    with open_stream(before, seq_len=32) as stream:
        list(islice(stream.steps(first_step=0, global_batch_size=G, micro_batch_size=8, rank=0, world_size=1), 9))
        state = json.loads(json.dumps(stream.state(9)))
    edited = config(built.path, tmp_path / "again", weights=[1, 9])
    assert traced(edited, 7, states=[state]) == traced(before, 7)
    assert traced(edited, 7) != traced(before, 7)


def test_the_rows_that_replace_a_quarantined_block_are_traced(built: Built, tmp_path: Path) -> None:
    shutil.copytree(built.path, tmp_path / "copy")
    shard = tmp_path / "copy" / built.manifest.splits["train"].shards[0].file
    data = bytearray(shard.read_bytes())
    data[HEADER_BYTES] ^= 1
    shard.write_bytes(data)
    chosen = config(tmp_path / "copy", on_bad_block="quarantine")
    steps = built.manifest.splits["train"].rows // G + 8
    with open_stream(chosen, seq_len=32) as stream:
        used = list(
            islice(stream.steps(first_step=0, global_batch_size=G, micro_batch_size=8, rank=0, world_size=1), steps)
        )
        state = stream.state(steps)
    tokenizer = load_tokenizer(built.path / "tokenizer")
    assert state["quarantined"]
    for step in range(steps):
        for position, sample in enumerate(traced(chosen, step, states=[state])):
            tokens = [t for t in used[step][0].tokens_BT[position].tolist() if t != tokenizer.end_of_document]
            assert "".join(document.text for document in sample.documents) == tokenizer.decode(tokens)
