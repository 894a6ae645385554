"""Damage, retries, mirrors, quarantine and remote data sets, tested through the stream."""

import logging
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError, StorageError
from data_pipeline.shards import storage
from data_pipeline.shards.manifest import TRAIN
from data_pipeline.shards.shard_file import HEADER_BYTES
from data_pipeline.stream.stream import Stream, open_stream
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.servers import Faults, http_server
from tests.data_pipeline.sets import build, config, documents

ROW_BYTES = 4 + 32 * 2
BLOCK_BYTES = 4 * ROW_BYTES


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FIRST_PAUSE_SECONDS", 0.001)


@pytest.fixture
def copy(built: Built, tmp_path: Path) -> Path:
    """A copy of the data set, which a test may damage."""
    shutil.copytree(built.path, tmp_path / "copy")
    return tmp_path / "copy"


def flip(file: Path, position: int) -> None:
    """Flips one bit of the byte at `position`."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def shard(folder: Path, built: Built, number: int = 0) -> Path:
    return folder / built.manifest.splits[TRAIN].shards[number].file


def read_all(stream: Stream, built: Built, rank: int = 0, ranks: int = 1) -> list[tuple[int, bytes]]:
    """The (sample, tokens) pairs of two epochs."""
    steps = stream.steps(first_step=0, global_batch_size=ranks, micro_batch_size=1, rank=rank, world_size=ranks)
    number = 2 * built.manifest.splits[TRAIN].rows // ranks
    return [(int(b.samples_B[0]), b.tokens_BT[0].tobytes()) for (b,) in islice(steps, number)]


@pytest.fixture(scope="module")
def expected(built: Built) -> list[tuple[int, bytes]]:
    with open_stream(config(built.path), seq_len=32) as stream:
        return read_all(stream, built)


@pytest.mark.parametrize("position", [0, 1, BLOCK_BYTES - 1])
def test_a_flipped_bit_stops_the_run_and_names_shard_block_and_rows(built: Built, copy: Path, position: int) -> None:
    flip(shard(copy, built, 1), HEADER_BYTES + 2 * BLOCK_BYTES + position)
    block = built.manifest.splits[TRAIN].shards[0].rows // 4 + 2
    message = (
        rf"shards/train-00001.shard, block {block}, train rows {4 * block} to {4 * block + 3} of .*copy: .*"
        r"bytes \d+ to \d+: the checksum is wrong. Restore the file, give data.sources a mirror, or set data.on_bad"
    )
    with open_stream(config(copy), seq_len=32) as stream, pytest.raises(DataError, match=message) as error:
        read_all(stream, built)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("bytes_left", [0, 10, HEADER_BYTES, 500, -1])
def test_a_truncated_shard_stops_the_run_with_its_name(built: Built, copy: Path, bytes_left: int) -> None:
    file = shard(copy, built)
    file.write_bytes(file.read_bytes()[:bytes_left])
    with open_stream(config(copy), seq_len=32) as stream, pytest.raises(DataError, match=r"copy/shards/train-00000"):
        read_all(stream, built)


@pytest.mark.parametrize("position", [3, -1, -50])
def test_a_damaged_header_or_index_is_detected(built: Built, copy: Path, position: int) -> None:
    flip(shard(copy, built), position)
    message = r"train-00000.shard.*the (header|index) is damaged; restore the file or give data.sources a mirror"
    with open_stream(config(copy), seq_len=32) as stream, pytest.raises(DataError, match=message):
        read_all(stream, built)


def test_an_error_in_the_prefetch_thread_is_raised_in_the_loop(built: Built, copy: Path) -> None:
    flip(shard(copy, built), HEADER_BYTES)
    chosen = config(copy, prefetch_batches=8)
    with open_stream(chosen, seq_len=32) as stream, pytest.raises(DataError, match=r"block 0, train rows 0 to 3"):
        read_all(stream, built)


def test_damaged_blocks_are_read_from_the_mirror(built: Built, copy: Path, expected: list[tuple[int, bytes]]) -> None:
    for block in (0, 3):
        flip(shard(copy, built), HEADER_BYTES + block * BLOCK_BYTES)
    flip(shard(copy, built, 2), -1)
    shard(copy, built, 3).unlink()
    with open_stream(config(copy, mirror=built.path), seq_len=32) as stream:
        assert read_all(stream, built) == expected


def test_quarantine_replaces_a_block_by_the_next_good_one_on_all_ranks(
    built: Built, copy: Path, expected: list[tuple[int, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    for block in (1, 2):
        flip(shard(copy, built), HEADER_BYTES + block * BLOCK_BYTES)
    chosen = config(copy, on_bad_block="quarantine")
    by_ranks = {}
    for ranks in (1, 2):
        got = []
        for rank in range(ranks):
            with open_stream(chosen, seq_len=32) as stream, caplog.at_level(logging.WARNING):
                got += read_all(stream, built, rank, ranks)
                quarantined = [entry[:2] for entry in stream.state(10)["quarantined"]]
            assert quarantined == [[0, 1], [0, 2]]
        by_ranks[ranks] = sorted(got)
    assert by_ranks[1] == by_ranks[2]
    assert "quarantined shards/train-00000.shard, block 1, train rows 4 to 7" in caplog.text
    differing = [(new, old) for new, old in zip(by_ranks[1], expected, strict=True) if new != old]
    with open_stream(config(built.path), seq_len=32) as stream:
        assert stream._plan.orders[0].rows == stream._train[0].rows
    assert 8 <= len(differing) <= 2 * 8  # the rows of blocks 1 and 2 became rows of block 3


def test_a_block_stays_quarantined_after_a_resume(built: Built, copy: Path) -> None:
    flip(shard(copy, built), HEADER_BYTES + BLOCK_BYTES)
    chosen = config(copy, on_bad_block="quarantine")
    with open_stream(chosen, seq_len=32) as stream:
        before = read_all(stream, built)
        saved = stream.state(0)
    shutil.copy(shard(built.path, built), shard(copy, built))  # repaired in the meantime
    with open_stream(chosen, seq_len=32) as stream:
        stream.restore([saved])
        assert read_all(stream, built) == before


def test_a_data_set_without_a_good_block_stops_the_run_in_spite_of_quarantine(tokenizer: Path, tmp_path: Path) -> None:
    manifest = build(tmp_path / "set", documents(6), tokenizer, block_bytes=1 << 20)
    flip(tmp_path / "set" / manifest.splits[TRAIN].shards[0].file, HEADER_BYTES)
    chosen = config(tmp_path / "set", on_bad_block="quarantine")
    with open_stream(chosen, seq_len=32) as stream, pytest.raises(DataError, match=r"every block of .* is quarantined"):
        next(stream.steps(first_step=0, global_batch_size=1, micro_batch_size=1, rank=0, world_size=1))


def test_a_damaged_tokenizer_is_detected(copy: Path) -> None:
    flip(copy / "tokenizer" / "tokenizer.model", 100)
    with pytest.raises(DataError, match=r"tokenizer/tokenizer.model is damaged; restore it from a copy"):
        open_stream(config(copy), seq_len=32)


@pytest.fixture
def served(built: Built) -> Iterator[tuple[str, Faults]]:
    with http_server(built.path.parent) as (address, faults):
        yield f"{address}/set", faults


def remote(address: str, **fields: object) -> DataConfig:
    return config(address, cache_gib=1e-3, **fields)


def test_an_address_gives_the_same_stream_as_the_folder(
    served: tuple[str, Faults], built: Built, expected: list[tuple[int, bytes]]
) -> None:
    address, _ = served
    for prefetch in (0, 16):
        with open_stream(remote(address, prefetch_batches=prefetch), seq_len=32) as stream:
            assert read_all(stream, built) == expected
            assert stream.vocab_size == built.manifest.vocab_size
            assert (stream.tokenizer_dir / "tokenizer.model").read_bytes()
        assert not stream.tokenizer_dir.exists()


def test_delays_errors_cut_connections_and_wrong_bits_change_nothing(
    served: tuple[str, Faults], built: Built, expected: list[tuple[int, bytes]]
) -> None:
    address, faults = served
    faults.delay_seconds, faults.errors, faults.cuts, faults.short, faults.flips = 0.001, 4, 3, 3, 3
    with open_stream(remote(address, prefetch_batches=16), seq_len=32) as stream:
        assert read_all(stream, built) == expected
    assert (faults.errors, faults.cuts, faults.short, faults.flips) == (0, 0, 0, 0)


def test_each_block_is_fetched_once_per_epoch_and_dropped_when_its_window_is_passed(
    served: tuple[str, Faults], built: Built
) -> None:
    address, faults = served
    with open_stream(remote(address), seq_len=32) as stream:
        read_all(stream, built)
        blocks = [request for request in faults.requests if "train" in request]
        # Two epochs, windows that are in two epochs, and the header and index of each shard.
        shards = len(built.manifest.splits[TRAIN].shards)
        assert len(blocks) <= 2 * stream._train[0].blocks * 1.15 + 2 * shards
        order = stream._plan.orders[0]
        open_at_once = 2 * order.lanes * order.window_blocks + 64  # and the group that is read together
        assert stream.cache.peak_bytes <= open_at_once * BLOCK_BYTES
        assert stream.cache.dropped_early == 0
        assert len(stream.cache) < stream._train[0].blocks / 2


def test_the_cache_stays_within_its_limit_even_if_blocks_must_be_fetched_twice(
    served: tuple[str, Faults], built: Built, expected: list[tuple[int, bytes]]
) -> None:
    address, _ = served
    limit = 5 * BLOCK_BYTES
    with open_stream(config(address, cache_gib=limit / 2**30, prefetch_batches=16), seq_len=32) as stream:
        assert read_all(stream, built) == expected
        assert 0 < stream.cache.peak_bytes <= limit
        assert stream.cache.dropped_early > 0


def test_a_server_that_stays_down_stops_the_run_with_the_exit_code_for_a_restart(
    served: tuple[str, Faults], built: Built
) -> None:
    address, faults = served
    with open_stream(remote(address), seq_len=32) as stream:
        faults.errors = 10_000
        with pytest.raises(StorageError, match=r"train-0000\d.shard.*503") as error:
            read_all(stream, built)
    assert error.value.exit_code == 1


def test_the_mirror_replaces_a_server_that_is_down(
    served: tuple[str, Faults], built: Built, expected: list[tuple[int, bytes]]
) -> None:
    address, faults = served
    faults.errors = 10_000
    with open_stream(remote(address, mirror=built.path), seq_len=32) as stream:
        assert read_all(stream, built) == expected


def test_a_local_compressed_data_set_is_read_through_the_cache(tokenizer: Path, built: Built, tmp_path: Path) -> None:
    build(tmp_path / "set", built.texts, tokenizer, compression="zstd", validation_share=0.05)
    with open_stream(config(tmp_path / "set"), seq_len=32) as stream:
        got = read_all(stream, built)
        assert 0 < stream.cache.peak_bytes < built.manifest.splits[TRAIN].rows * ROW_BYTES
    with open_stream(config(built.path), seq_len=32) as stream:
        assert got == read_all(stream, built)
