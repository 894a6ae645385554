from pathlib import Path

import pytest

from data_pipeline.build.folder import work_folder
from data_pipeline.build.lock import build_lock
from data_pipeline.build.options import BuildOptions
from data_pipeline.build.prepare import build_dataset
from data_pipeline.build.repack import repack_dataset
from data_pipeline.build.workers import Pool
from data_pipeline.errors import DataError
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.sets import documents, write_jsonl


def test_a_second_build_of_the_same_output_is_refused(built: Built, tokenizer: Path, tmp_path: Path) -> None:
    file, out = write_jsonl(tmp_path / "a.jsonl", documents(20)), tmp_path / "set"
    with build_lock(out):
        for share in (None, (0, 2)):
            with pytest.raises(DataError, match=r"another build of .*set is running; wait until it ends, or choose"):
                build_dataset([str(file)], out, tokenizer, BuildOptions(seq_len=32), share=share)
        with pytest.raises(DataError, match=r"another build of .*set is running"):
            repack_dataset(str(built.path), out, BuildOptions(seq_len=8), Pool(None))
    assert build_dataset([str(file)], out, tokenizer, BuildOptions(seq_len=32)) is not None
    assert not work_folder(out).exists()


def test_the_parts_of_a_job_array_run_together_but_not_with_the_last_job(tokenizer: Path, tmp_path: Path) -> None:
    file, out = write_jsonl(tmp_path / "a.jsonl", documents(20)), tmp_path / "set"
    with build_lock(out, shared=True):
        build_dataset([str(file)], out, tokenizer, BuildOptions(seq_len=32), share=(0, 2))
        with pytest.raises(DataError, match=r"another build of .*set is running"):
            build_dataset([str(file)], out, tokenizer, BuildOptions(seq_len=32))


def test_a_share_that_fails_leaves_the_work_of_the_others(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"is not UTF-8"):
        build_dataset([str(tmp_path / "a.txt")], tmp_path / "set", tokenizer, BuildOptions(), share=(0, 2))
    assert work_folder(tmp_path / "set").exists()
