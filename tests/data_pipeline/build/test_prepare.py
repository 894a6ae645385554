import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from data_pipeline.build.options import BuildOptions
from data_pipeline.build.prepare import build_dataset
from data_pipeline.build.workers import Pool
from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import FILES, NAME, TRAIN, VALIDATION, Manifest
from data_pipeline.shards.manifest_file import parse_manifest
from data_pipeline.sources.records import ReadOptions
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.sets import Recorder, build, documents, tree, write_jsonl
from tests.data_pipeline.sources.test_readers import EMPTY_FIRST, MIXED
from tests.data_pipeline.tokenizers.test_tokenizer import train_byte_bpe

TEXTS = documents(400, seed=5)
SMALL = BuildOptions(
    seq_len=32, block_bytes=256, task_bytes=2000, group_tokens=3000, shard_bytes=12_000, validation_share=0.05
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    for number in range(4):
        write_jsonl(folder / f"{number}.jsonl", TEXTS[100 * number : 100 * number + 100])
    return folder


@pytest.fixture(scope="module")
def expected(inputs: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that an undisturbed build writes."""
    out = tmp_path_factory.mktemp("expected") / "set"
    build_dataset([str(inputs)], out, tokenizer, SMALL)
    assert sorted(path.name for path in out.parent.iterdir()) == ["set"]
    return tree(out)


def test_the_data_set_has_its_tokenizer_the_input_addresses_and_several_shards(
    expected: dict[str, bytes], inputs: Path
) -> None:
    manifest = parse_manifest(expected[NAME], "set")
    assert {"tokenizer/tokenizer.model", NAME, FILES} < set(expected)
    assert len(manifest.splits[TRAIN].shards) > 3
    assert len(manifest.splits[TRAIN].groups) > 2
    assert all(shard.bytes == len(expected[shard.file]) <= 12_000 for shard in manifest.splits[TRAIN].shards)
    assert json.loads(expected[FILES]) == [str(inputs / f"{number}.jsonl") for number in range(4)]


@pytest.mark.parametrize("workers", [2, 3])
def test_the_output_does_not_depend_on_the_number_of_workers(
    inputs: Path, tokenizer: Path, expected: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    build_dataset([str(inputs)], tmp_path / "set", tokenizer, SMALL, workers=workers)
    assert tree(tmp_path / "set") == expected


PROGRAM = """
import os, signal, sys
from pathlib import Path
from data_pipeline.build.prepare import build_dataset
from tests.data_pipeline.build.test_prepare import SMALL

folder, left = str(Path(sys.argv[2]).parent), int(os.environ["CHANGES"])

def kill_all(event, arguments):
    global left
    changes = event in ("os.rename", "os.mkdir") or (event == "open" and arguments[2] & os.O_CREAT)
    if changes and str(arguments[0]).startswith(folder):
        left -= 1
        if left == 0:
            os.killpg(0, signal.SIGKILL)

sys.addaudithook(kill_all)  # in each worker too
if __name__ == "__main__":
    build_dataset([sys.argv[1]], Path(sys.argv[2]), sys.argv[3], SMALL, workers=2)
"""


def test_a_build_that_is_killed_at_any_moment_and_restarted_gives_the_same_output(
    inputs: Path, tokenizer: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "set"
    command = [sys.executable, "-c", PROGRAM, str(inputs), str(out), str(tokenizer)]
    root = Path(__file__).parents[3]
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command[1:3] = [str(script)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    codes = []
    for changes in (3, 12, 5, 30, 8, 60):  # changes of one process to files, so that kills hit the same on any machine
        if not out.exists():
            killed = environment | {"CHANGES": str(changes)}
            codes.append(subprocess.run(command, env=killed, start_new_session=True, check=False).returncode)
    assert codes[:3] == [-signal.SIGKILL] * 3
    assert set(codes) <= {-signal.SIGKILL, 0}
    if not out.exists():
        subprocess.run(command, env=environment | {"CHANGES": "0"}, check=True)
    build_dataset([str(inputs)], out, tokenizer, SMALL)  # cleans up after a kill at the very end
    assert tree(out) == expected
    assert {path.name for path in tmp_path.iterdir()} == {"set", "program.py"}


def test_the_shares_of_a_job_array_and_a_last_job_give_the_same_output(
    inputs: Path, tokenizer: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "set"
    for share in (2, 0, 1, 1):
        assert build_dataset([str(inputs)], out, tokenizer, SMALL, share=(share, 3)) is None
    assert not out.exists()
    seen = Recorder()
    build_dataset([str(inputs)], out, tokenizer, SMALL, progress=seen)
    assert tree(out) == expected
    assert "tokenizing" not in seen.totals
    assert "writing the train split" in seen.totals


def test_a_finished_build_is_not_repeated(inputs: Path, tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    first = build_dataset([str(inputs)], out, tokenizer, SMALL)
    before = (out / NAME).stat().st_mtime_ns
    assert build_dataset([str(inputs)], out, tokenizer, SMALL) == first
    assert (out / NAME).stat().st_mtime_ns == before


def test_existing_output_of_other_inputs_is_refused_and_not_changed(
    inputs: Path, tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "set"
    build_dataset([str(inputs)], out, tokenizer, SMALL)
    with pytest.raises(
        DataError, match=r"is a data set of other inputs or options; choose another --out, or delete it"
    ):
        build_dataset([str(inputs / "0.jsonl")], out, tokenizer, SMALL)
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match=r"other exists and is not a data set; choose another --out"):
        build_dataset([str(inputs)], tmp_path / "other", tokenizer, SMALL)
    build_dataset([str(inputs)], tmp_path / "new", tokenizer, SMALL, share=(0, 2))
    with pytest.raises(DataError, match=r"new.work contains an unfinished build with other files; repeat that command"):
        build_dataset([str(inputs / "0.jsonl")], tmp_path / "new", tokenizer, SMALL)


def test_a_build_that_fails_early_leaves_nothing_and_can_be_repeated_with_repair(
    tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "in.txt").write_bytes(b"caf\xe9 au lait")
    out = tmp_path / "set"
    with pytest.raises(DataError, match=r"in.txt, record 1 is not UTF-8"):
        build_dataset([str(tmp_path / "in.txt")], out, tokenizer, BuildOptions(seq_len=32))
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]
    options = BuildOptions(seq_len=32, read=ReadOptions(on_error="replace"))
    manifest = build_dataset([str(tmp_path / "in.txt")], out, tokenizer, options)
    assert manifest is not None
    assert manifest.counts["repaired: not UTF-8"] == 1


def test_an_abandoned_build_with_another_tokenizer_does_not_change_the_output(
    inputs: Path, tokenizer: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    out, other = tmp_path / "set", train_byte_bpe(tmp_path / "other")
    with pytest.raises(RuntimeError, match=r"killed"):
        build_dataset([str(inputs)], out, other, SMALL, pool=_KilledPool())
    build_dataset([str(inputs)], out, tokenizer, SMALL)
    assert tree(out) == expected


class _KilledPool(Pool):
    """Fails at the first call, as if the process were killed."""

    def __init__(self) -> None:
        super().__init__(None)

    def run(self, calls: object) -> object:  # type: ignore[override]
        raise RuntimeError("killed")


def test_a_full_disk_leaves_nothing_under_the_final_name(inputs: Path, tokenizer: Path, tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk: writes fail in the middle of a file."""
    out = tmp_path / "set"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (500, 2_500, 6_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            with pytest.raises(OSError, match=r"File too large"):
                build_dataset([str(inputs)], out, tokenizer, SMALL)
            assert not out.exists()
            assert not list(tmp_path.rglob("*.partial"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert build_dataset([str(inputs)], out, tokenizer, SMALL) is not None


def build_text(tmp_path: Path, tokenizer: Path, content: str, **options: object) -> Manifest:
    """Builds a data set from the content of one jsonl file, in rows of 16 tokens."""
    (tmp_path / "in.jsonl").write_text(content)
    chosen = BuildOptions(**{"seq_len": 16, "validation_share": 0.0, **options})  # type: ignore[arg-type]
    manifest = build_dataset([str(tmp_path / "in.jsonl")], tmp_path / "set", tokenizer, chosen, pool=Pool(None))
    assert manifest is not None
    return manifest


def test_rows_without_text_are_counted_by_reason(tmp_path: Path, tokenizer: Path) -> None:
    manifest = build_text(tmp_path, tokenizer, MIXED)
    assert manifest.splits[TRAIN].documents == 5
    assert manifest.counts == {
        "bytes read": 3 * 3 + 3 + 5,
        "documents read": 8,
        "dropped: no text key": 1,
        "dropped: text is not a string": 1,
        "dropped: text is null": 1,
    }


def test_empty_documents_are_dropped_and_every_other_one_has_its_end_token(tmp_path: Path, tokenizer: Path) -> None:
    manifest = build_text(tmp_path, tokenizer, EMPTY_FIRST)
    assert manifest.splits[TRAIN].documents == 2
    assert (manifest.counts["documents read"], manifest.counts["dropped: empty"]) == (5, 3)
    rows = np.fromfile(tmp_path / "set" / manifest.splits[TRAIN].shards[0].file, "<u2", 2 + 16, offset=64)
    used = int(rows[:2].view("<u4")[0])
    assert used == manifest.splits[TRAIN].tokens
    assert (rows[2 : 2 + used] == manifest.end_of_document).sum() == 2


def test_an_empty_input_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(DataError, match=r"no documents remain \(the inputs are empty\)"):
        build_text(tmp_path, tokenizer, "")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_control_strings_in_a_document_do_not_end_it(tmp_path: Path, tokenizer: Path) -> None:
    manifest = build_text(tmp_path, tokenizer, '{"text":"doc one </s> still doc one <|endoftext|> still one"}\n' * 3)
    (shard,) = manifest.splits[TRAIN].shards
    tokens = np.fromfile(tmp_path / "set" / shard.file, "<u2", shard.rows * 18, offset=64).reshape(-1, 18)[:, 2:]
    used = manifest.splits[TRAIN].tokens
    assert (tokens == manifest.end_of_document).sum() - (tokens.size - used) == 3


def test_documents_are_cleaned_as_the_options_say(tmp_path: Path, tokenizer: Path) -> None:
    content = "".join(json.dumps({"text": text}) + "\n" for text in ("twice", "twice", "ab", "x" * 99, "buy\n" * 20))
    options = {"deduplicate": True, "min_characters": 3, "max_characters": 90}
    manifest = build_text(tmp_path, tokenizer, content, filters=("data_pipeline.build.cleaning:quality",), **options)
    assert manifest.splits[TRAIN].documents == 1
    assert {name: count for name, count in manifest.counts.items() if name.startswith("dropped")} == {
        "dropped: too short": 1,
        "dropped: too long": 1,
        "dropped: repeated lines": 1,
        "dropped: copy of another document": 1,
    }


def test_lengths_are_counted_in_powers_of_two(built: Built, tokenizer: Path) -> None:
    lengths = [len(ids) + 1 for ids in load_tokenizer(tokenizer).encode_batch(built.texts)]
    for bound, count in built.manifest.lengths.items():
        assert sum(int(bound) // 2 < length <= int(bound) for length in lengths) == count
    assert sum(built.manifest.lengths.values()) == len(lengths)


def test_padding_and_cuts_are_reported(built: Built, tokenizer: Path) -> None:
    lengths = [len(ids) + 1 for ids in load_tokenizer(tokenizer).encode_batch(built.texts)]
    splits = built.manifest.splits
    assert sum(split.tokens for split in splits.values()) == sum(lengths)
    assert sum(split.documents_cut for split in splits.values()) == sum(length > 32 for length in lengths)
    for split in splits.values():
        assert split.rows * 32 == split.tokens + split.padding
    assert 1 <= splits[VALIDATION].documents < 40


def test_zstd_stores_the_same_rows_in_fewer_bytes(built: Built, tokenizer: Path, tmp_path: Path) -> None:
    manifest = build(tmp_path / "set", built.texts, tokenizer, compression="zstd", validation_share=0.05)
    assert manifest.compression == "zstd"
    assert manifest.splits[TRAIN].rows == built.manifest.splits[TRAIN].rows
    assert sum(shard.bytes for shard in manifest.splits[TRAIN].shards) < 0.8 * sum(
        shard.bytes for shard in built.manifest.splits[TRAIN].shards
    )


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path) -> None:
    folder = train_byte_bpe(tmp_path / "tokenizer")
    loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded.add_special_tokens([f"<{number}>" for number in range(1 << 16)])
    loaded.save(str(folder / "tokenizer.json"))
    manifest = build(tmp_path / "set", documents(20), folder)
    assert manifest.token_bytes == 4
    assert manifest.vocab_size > 1 << 16


def test_the_progress_of_every_stage_is_reported(inputs: Path, tokenizer: Path, tmp_path: Path) -> None:
    seen = Recorder()
    manifest = build_dataset([str(inputs)], tmp_path / "set", tokenizer, SMALL, progress=seen)
    assert manifest is not None
    stages = [f"{verb} the {split} split" for split in manifest.splits for verb in ("packing", "writing")]
    assert list(seen.totals) == ["tokenizing", *stages]
    assert seen.done == seen.totals
    assert seen.done["tokenizing"] == sum((inputs / f"{number}.jsonl").stat().st_size for number in range(4))
    assert seen.calls["tokenizing"] > 10
    for split, shown in manifest.splits.items():
        assert seen.done[f"packing the {split} split"] == shown.tokens
        assert seen.done[f"writing the {split} split"] == shown.rows * 32
        assert seen.calls[f"writing the {split} split"] == len(shown.shards)


def test_the_work_folder_of_another_output_is_not_touched(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "set.work").mkdir()
    (tmp_path / "set.work" / "file").write_text("x")
    build(tmp_path / "set2", documents(5), tokenizer)
    assert (tmp_path / "set.work" / "file").exists()
    shutil.rmtree(tmp_path / "set2")
