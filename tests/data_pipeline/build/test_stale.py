import importlib
import os
import time
from pathlib import Path

import pytest

from data_pipeline.build.options import BuildOptions
from data_pipeline.build.plan import make_plan, plan_hash
from data_pipeline.build.prepare import build_dataset
from data_pipeline.build.tokenizing import TokenizeOptions, make_filters, run_task
from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.manifest_file import write_manifest
from data_pipeline.sources.files import Part, check_unchanged, local_file
from data_pipeline.sources.records import ReadOptions
from tests.data_pipeline.sets import documents, write_jsonl

OPTIONS = BuildOptions(seq_len=32, validation_share=0.05)


def edit(file: Path, old: str, new: str) -> None:
    """Changes the content at equal size, a second later."""
    file.write_text(file.read_text().replace(old, new))
    os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns + 10**9))


def build(inputs: Path, out: Path, tokenizer: Path, **options: object) -> Manifest | None:
    return build_dataset([str(inputs)], out, tokenizer, BuildOptions(**{"seq_len": 32, **options}))  # type: ignore[arg-type]


def test_an_input_that_was_edited_at_equal_size_is_not_taken_for_the_old_one(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["the cat sat", "a dog ran"])
    assert build(file, tmp_path / "set", tokenizer) is not None
    edit(file, "cat", "dog")
    with pytest.raises(
        DataError, match=r"is a data set of other inputs or options; .*that were edited count as others"
    ):
        build(file, tmp_path / "set", tokenizer)


def test_an_unfinished_build_is_not_continued_after_an_edit(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["the cat sat", "a dog ran"])
    build_dataset([str(file)], tmp_path / "set", tokenizer, OPTIONS, share=(0, 1))
    edit(file, "cat", "dog")
    with pytest.raises(DataError, match=r"contains an unfinished build with other files"):
        build_dataset([str(file)], tmp_path / "set", tokenizer, OPTIONS)


def test_a_task_whose_file_changed_since_the_build_began_fails(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["the cat sat"])
    listed = local_file(file)
    edit(file, "cat", "dog")
    with pytest.raises(DataError, match=r"a.jsonl changed while the build was reading it; delete"):
        run_task(tmp_path, 0, (Part(0),), {0: listed}, tokenizer, TokenizeOptions(ReadOptions()), "<u2")
    assert not list(tmp_path.glob("task-*"))


def test_a_file_that_disappeared_is_one_line(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["x"])
    listed = local_file(file)
    file.unlink()
    with pytest.raises(DataError, match=r"cannot read .*a.jsonl"):
        check_unchanged(listed)


def test_a_filter_that_was_edited_is_another_filter(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "stale_filter.py"
    module.write_text("LIMIT = 5\ndef keep(text):\n    return 'long' if len(text) > LIMIT else None\n")
    importlib.invalidate_caches()
    file = write_jsonl(tmp_path / "a.jsonl", ["cat", "the cat sat"])
    filters = ("stale_filter:keep",)
    manifest = build(file, tmp_path / "set", tokenizer, filters=filters)
    assert manifest is not None
    assert manifest.counts["dropped: long"] == 1
    sources = make_plan([str(file)], BuildOptions(filters=filters), {}, 300, 2).filters
    edit(module, "5", "50")
    with pytest.raises(DataError, match=r"filters that were edited count as others"):
        build(file, tmp_path / "set", tokenizer, filters=filters)
    with pytest.raises(DataError, match=r"--filter stale_filter:keep was edited while the build was running"):
        make_filters(TokenizeOptions(ReadOptions(), filters=filters, filter_sources=sources))


def test_a_data_set_of_an_earlier_version_is_finished_unless_an_input_is_newer(tokenizer: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", documents(20))
    manifest = build_dataset([str(file)], tmp_path / "set", tokenizer, OPTIONS)
    assert manifest is not None
    plan = make_plan([str(file)], OPTIONS, manifest.tokenizer, 320, 2)
    earlier = plan_hash(plan.earlier_content)
    write_manifest(tmp_path / "set", Manifest(**{**vars_of(manifest), "plan": earlier}))
    assert build_dataset([str(file)], tmp_path / "set", tokenizer, OPTIONS) is not None
    edit(file, "cat", "dog")
    with pytest.raises(DataError, match=r"is a data set of other inputs"):
        build_dataset([str(file)], tmp_path / "set", tokenizer, OPTIONS)
    assert DataSet(str(tmp_path / "set")).manifest.plan == earlier


def vars_of(manifest: Manifest) -> dict[str, object]:
    return {name: value for name, value in vars(manifest).items() if name != "fingerprint"}
