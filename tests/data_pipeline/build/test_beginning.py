from pathlib import Path

import numpy as np

from data_pipeline.build.options import BuildOptions
from data_pipeline.build.prepare import build_dataset
from data_pipeline.shards.dataset import DataSet
from tests.data_pipeline.sets import documents, write_jsonl


def test_documents_begin_with_the_token_that_the_user_names(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", documents(9))
    options = BuildOptions(seq_len=16, validation_share=0.0, packing="concatenate")
    plain, begun = (
        build_dataset([str(file)], tmp_path / name, tokenizer, options, beginning_of_document=token)
        for name, token in (("plain", None), ("begun", "<s>"))
    )
    assert plain is not None
    assert begun is not None
    assert begun.splits["train"].tokens == plain.splits["train"].tokens + 9
    (shard,) = begun.splits["train"].shards
    rows = np.fromfile(tmp_path / "begun" / shard.file, "<u2", shard.rows * 18, offset=64).reshape(-1, 18)[:, 2:]
    tokens = rows.reshape(-1)[: begun.splits["train"].tokens]
    assert tokens[0] == 1
    assert (tokens[np.flatnonzero(tokens == 2)[:-1] + 1] == 1).all()
    assert (tokens == 1).sum() == 9
    assert DataSet(str(tmp_path / "begun")).tokenizer().beginning_of_document == 1
