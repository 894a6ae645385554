import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import TRAIN, VALIDATION
from data_pipeline.stream.audit import audit, plan_of
from data_pipeline.stream.batch import IGNORE, Batch
from data_pipeline.stream.stream import Stream, merge_states, open_stream
from data_pipeline.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.sets import build, config, documents
from tests.data_pipeline.stream.test_prefetch import prefetch_threads

G = 24


@pytest.fixture(scope="module")
def mixed(built: Built, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Three sources: one of several lanes, one of few compressed blocks, and one of a single block."""
    folder = tmp_path_factory.mktemp("mixed")
    build(folder / "large", documents(1300, 1), tokenizer, block_bytes=128)
    build(folder / "small", documents(60, 2), tokenizer, compression="zstd")
    build(folder / "tiny", documents(4, 3), tokenizer)
    return config(folder / "large", folder / "small", folder / "tiny", weights=[5, 3, 1])


def steps_of(
    stream: Stream, first: int, number: int, rank: int = 0, ranks: int = 1, micro: int = 1
) -> list[list[Batch]]:
    steps = stream.steps(first_step=first, global_batch_size=G, micro_batch_size=micro, rank=rank, world_size=ranks)
    return list(islice(steps, number))


def rows(step: list[Batch]) -> list[tuple[Any, ...]]:
    """The rows of a step by sample, with all their arrays."""
    return sorted(
        (int(batch.samples_B[b]), int(batch.sources_B[b]), *(getattr(batch, name)[b].tobytes() for name in ARRAYS))
        for batch in step
        for b in range(len(batch.samples_B))
    )


ARRAYS = ("tokens_BT", "labels_BT", "positions_BT", "documents_BT")


@pytest.fixture(scope="module")
def expected(mixed: DataConfig) -> list[list[tuple[Any, ...]]]:
    """60 steps, read by one rank without a resume."""
    with open_stream(mixed, seq_len=32) as stream:
        return [rows(step) for step in steps_of(stream, 0, 60)]


def test_sample_i_of_step_s_is_sample_s_times_g_plus_i(expected: list[list[tuple[Any, ...]]]) -> None:
    assert [[row[0] for row in step] for step in expected] == [list(range(s * G, s * G + G)) for s in range(60)]
    assert {row[1] for step in expected for row in step} == {0, 1, 2}


@pytest.mark.parametrize("prefetch", [0, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_order_is_the_same_for_every_number_of_ranks_and_through_two_resumes(
    mixed: DataConfig, expected: list[list[tuple[Any, ...]]], ranks: int, prefetch: int
) -> None:
    """Runs 20 steps, saves, resumes on another number of ranks, saves, and resumes again."""
    chosen = mixed.model_copy(update={"prefetch_batches": prefetch})
    states: list[dict[str, Any]] = []
    for first, number, world in ((0, 20, ranks), (20, 17, 12 // ranks if 12 % ranks == 0 else 2), (37, 23, ranks)):
        got: list[list[tuple[Any, ...]]] = [[] for _ in range(number)]
        saved = []
        for rank in range(world):
            with open_stream(chosen, seq_len=32) as stream:
                if states:
                    stream.restore(states)
                for i, step in enumerate(steps_of(stream, first, number, rank, world)):
                    got[i] += rows(step)
                    assert {sample % world for sample, *_ in rows(step)} == {rank}
                saved.append(json.loads(json.dumps(stream.state(first + number))))
        states = saved
        assert [sorted(step) for step in got] == expected[first : first + number]
    assert merge_states(states)["samples"] == 60 * G
    assert sum(entry[2] for entry in merge_states(states)["counters"]) == 60 * G


@pytest.mark.parametrize("micro", [1, 2, 4, 12])
def test_the_micro_batch_size_does_not_change_the_rows_of_a_step(
    mixed: DataConfig, expected: list[list[tuple[Any, ...]]], micro: int
) -> None:
    with open_stream(mixed, seq_len=32) as stream:
        steps = steps_of(stream, 5, 3, rank=1, ranks=2, micro=micro)
    assert [len(step) for step in steps] == [12 // micro] * 3
    assert [rows(step) for step in steps] == [[row for row in step if row[0] % 2] for step in expected[5:8]]


def test_the_next_sample_after_100_steps_of_512_is_51200_on_any_number_of_ranks(mixed: DataConfig) -> None:
    for ranks in (4, 2, 8):
        with open_stream(mixed, seq_len=32) as stream:
            steps = stream.steps(first_step=100, global_batch_size=512, micro_batch_size=4, rank=0, world_size=ranks)
            assert next(steps)[0].samples_B[0] == 51_200


@pytest.fixture(scope="module")
def few(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A data set of few blocks, so that its epochs do not mix."""
    path = tmp_path_factory.mktemp("few") / "set"
    texts = documents(300, 4)
    return Built(path, build(path, texts, tokenizer, block_bytes=2048, validation_share=0.05), texts)


def test_one_epoch_gives_every_document_once(few: Built) -> None:
    tokenizer = load_tokenizer(few.path / "tokenizer")
    short = {text for text in few.texts if len(tokenizer.encode(text)) < 32}
    with open_stream(config(few.path), seq_len=32) as stream:
        steps = stream.steps(first_step=0, global_batch_size=1, micro_batch_size=1, rank=0, world_size=1)
        train = [batch for (batch,) in islice(steps, few.manifest.splits[TRAIN].rows)]
        validated = list(stream.validation(sequences=10_000, micro_batch_size=1, rank=0, world_size=1))
    found = Counter(text for batch in train + validated for text in documents_of(batch, tokenizer))
    assert len(short) > 50
    assert {text: count for text, count in found.items() if text in short} == dict.fromkeys(short, 1)


def documents_of(batch: Batch, tokenizer: Tokenizer) -> list[str]:
    """The texts of a batch of one row, without end-of-document tokens."""
    ends = np.flatnonzero(np.diff(batch.documents_BT[0])) + 1
    return [tokenizer.decode(piece[:-1].tolist()) for piece in np.split(batch.tokens_BT[0], ends) if len(piece) > 1]


def test_document_boundaries_are_those_that_the_shard_records(built: Built) -> None:
    """The reader finds the ends of documents by their token. The shard stores their starts separately."""
    with open_stream(config(built.path), seq_len=32) as stream:
        reader = stream._train[0]
        zeros = np.zeros(reader.rows, np.int64)
        tokens, used = reader.cut_rows(np.arange(reader.rows), 1, zeros, zeros)
        for row in range(reader.rows):
            starts, pieces = reader.origins(row // 4)
            recorded = pieces[starts[row % 4] : starts[row % 4 + 1]]["start"].tolist()
            ends = np.flatnonzero(tokens[row, : used[row] - 1] == stream.end_of_document) + 1
            assert recorded == [0, *ends.tolist()]


@pytest.mark.parametrize("seq_len", [16, 8, 1])
def test_rows_are_read_at_any_divisor_of_their_length(few: Built, seq_len: int) -> None:
    with open_stream(config(few.path), seq_len=seq_len) as stream:
        number = few.manifest.splits[TRAIN].rows * (32 // seq_len)
        steps = stream.steps(first_step=0, global_batch_size=1, micro_batch_size=1, rank=0, world_size=1)
        cut = sorted(batch.tokens_BT[0].tobytes() for (batch,) in islice(steps, number))
    with open_stream(config(few.path), seq_len=32) as stream:
        steps = stream.steps(first_step=0, global_batch_size=1, micro_batch_size=1, rank=0, world_size=1)
        whole = np.concatenate([batch.tokens_BT[0] for (batch,) in islice(steps, few.manifest.splits[TRAIN].rows)])
    assert cut == sorted(row.tobytes() for row in whole.reshape(-1, seq_len))


def test_a_sequence_length_that_does_not_divide_the_rows_is_refused(built: Built) -> None:
    with pytest.raises(DataError, match=r"model.seq_len \(24\) must divide the rows of .* \(32 tokens\).*data repack"):
        open_stream(config(built.path), seq_len=24)


def test_a_global_batch_that_the_ranks_cannot_share_is_refused(built: Built) -> None:
    with open_stream(config(built.path), seq_len=32) as stream, pytest.raises(DataError, match=r"must be a multiple"):
        stream.steps(first_step=0, global_batch_size=10, micro_batch_size=2, rank=0, world_size=2)


def test_the_validation_rows_are_the_same_for_every_number_of_ranks(mixed: DataConfig) -> None:
    with open_stream(mixed, seq_len=32) as stream:
        available = sum(dataset.manifest.splits[VALIDATION].rows for dataset in stream._datasets)
        for wanted in (7, 10_000):
            expected = None
            for ranks in (1, 2, 3):
                got = [list(validation(stream, wanted, rank, ranks)) for rank in range(ranks)]
                assert len({len(batches) for batches in got}) == 1
                every = sorted(row for batches in got for row in rows(batches) if row[0] >= 0)
                assert [row[0] for row in every] == list(range(min(wanted, available)))
                assert expected in (None, every)
                expected = every
                padding = [b for batches in got for batch in batches for b in batch.labels_BT[batch.samples_B < 0]]
                assert all((row == IGNORE).all() for row in padding)


def validation(stream: Stream, sequences: int, rank: int, ranks: int) -> Iterator[Batch]:
    return stream.validation(sequences=sequences, micro_batch_size=2, rank=rank, world_size=ranks)


def test_weights_change_at_their_step_and_are_saved(mixed: DataConfig, expected: list[list[tuple[Any, ...]]]) -> None:
    planned = DataConfig(**{**mixed.model_dump(), "weight_changes": [{"step": 30, "weights": [0.001, 1, 1]}]})
    with open_stream(planned, seq_len=32) as stream:
        got = [rows(step) for step in steps_of(stream, 0, 60)]
        state = stream.state(60)
    assert got[:30] == expected[:30]
    assert sum(row[1] == 0 for step in got[30:] for row in step) < 30
    assert state["weights"] == [[0, [5, 3, 1]], [30 * G, [0.001, 1, 1]]]
    with open_stream(planned, seq_len=32) as stream:  # resumed after the change
        stream.restore([state])
        more = [rows(step) for step in steps_of(stream, 60, 5)]
    with open_stream(planned, seq_len=32) as stream:
        assert [rows(step) for step in steps_of(stream, 60, 5)] == more


def test_weights_edited_between_two_starts_are_used_from_there(
    mixed: DataConfig, expected: list[list[tuple[Any, ...]]]
) -> None:
    with open_stream(mixed, seq_len=32) as stream:
        steps_of(stream, 0, 30)
        saved = stream.state(30)
    edited = config(*(source.path for source in mixed.sources), weights=[1, 1, 4])
    with open_stream(edited, seq_len=32) as stream:
        stream.restore([saved])
        first = [rows(step) for step in steps_of(stream, 30, 10)]
        later = stream.state(40)
    assert later["weights"] == [[0, [5, 3, 1]], [30 * G, [1, 1, 4]]]
    assert first != expected[30:40]
    with open_stream(edited, seq_len=32) as stream:  # a second resume gives the same
        stream.restore([saved])
        whole = [rows(step) for step in steps_of(stream, 30, 20)]
    with open_stream(edited, seq_len=32) as stream:
        stream.restore([later])
        assert whole == first + [rows(step) for step in steps_of(stream, 40, 10)]


def test_changes_of_weights_must_fit() -> None:
    with pytest.raises(ValueError, match=r"needs one weight for each of the 2 sources, .* not \[1.0\]"):
        config("a", "b", weight_changes=[{"step": 1, "weights": [1]}])
    with pytest.raises(ValueError, match=r"in order of step, each step once, not \[2, 2\]"):
        config("a", weight_changes=[{"step": 2, "weights": [1]}, {"step": 2, "weights": [2]}])


def saved_state(chosen: DataConfig, **changes: Any) -> dict[str, Any]:
    with open_stream(chosen, seq_len=32) as stream:
        steps_of(stream, 0, 3)
        return {**stream.state(3), **changes}


def test_a_resume_with_another_data_set_is_refused_with_what_changed(
    built: Built, tokenizer: Path, tmp_path: Path
) -> None:
    state = saved_state(config(built.path))
    build(tmp_path / "other", documents(299), tokenizer, validation_share=0.05)
    message = r"other is not the data set that the checkpoint was trained on \(.*set, fingerprint .*documents \d+ -> "
    with open_stream(config(tmp_path / "other"), seq_len=32) as stream, pytest.raises(DataError, match=message):
        stream.restore([state])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 7}, r"data.seed 7, but now it is 1"),
        ({"seq_len": 16}, r"model.seq_len 16, but now it is 32"),
        ({"sources": 2}, r"with 2 data.sources, but now there are 1: .* set its weight to 0"),
    ],
)
def test_a_resume_with_another_order_of_samples_is_refused(built: Built, changes: dict[str, Any], message: str) -> None:
    state = saved_state(config(built.path))
    state |= {"sources": state["sources"] * changes["sources"]} if "sources" in changes else changes
    with open_stream(config(built.path), seq_len=32) as stream, pytest.raises(DataError, match=message):
        stream.restore([state])


def test_a_resume_at_another_sample_is_refused(built: Built) -> None:
    state = saved_state(config(built.path))
    with open_stream(config(built.path), seq_len=32) as stream:
        stream.restore([state])
        with pytest.raises(DataError, match=r"is at sample 72 \(3 steps of 24\), but step 4 of .* sample 96"):
            steps_of(stream, 4, 1)


def test_a_data_set_may_be_moved_between_two_starts(built: Built, tmp_path: Path) -> None:
    (tmp_path / "moved").symlink_to(built.path)
    with open_stream(config(tmp_path / "moved"), seq_len=32) as stream:
        stream.restore([saved_state(config(built.path))])
        assert len(steps_of(stream, 3, 1)) == 1


def test_tensor_parallel_peers_count_once(built: Built) -> None:
    state = saved_state(config(built.path))
    assert merge_states([state, state])["counters"] == state["counters"]


def test_counters_include_only_finished_steps_however_far_the_stream_read(built: Built) -> None:
    for prefetch in (0, 16):
        with open_stream(config(built.path, prefetch_batches=prefetch), seq_len=32) as stream:
            steps = stream.steps(first_step=0, global_batch_size=G, micro_batch_size=4, rank=0, world_size=1)
            for step in range(1, 12):
                next(steps)
                assert sum(entry[2] for entry in stream.state(step)["counters"]) == step * G


def test_a_new_call_of_steps_stops_the_thread_of_the_one_before(built: Built) -> None:
    before = prefetch_threads()
    with open_stream(config(built.path, prefetch_batches=16), seq_len=32) as stream:
        for first in (0, 5, 2):
            steps_of(stream, first, 2)
            assert prefetch_threads() == before + 1
    assert prefetch_threads() == before


def test_sources_with_different_tokenizers_are_refused(built: Built, tmp_path: Path) -> None:
    from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece

    train_sentencepiece(documents(50), tmp_path / "tokenizer", vocab_size=300)
    build(tmp_path / "other", documents(30), tmp_path / "tokenizer")
    with pytest.raises(DataError, match=r"data.sources\[1\] .*other was built with another tokenizer than"):
        open_stream(config(built.path, tmp_path / "other"), seq_len=32)


def test_a_path_without_a_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no data set in .* \(no manifest.json\); check data.sources or build one"):
        open_stream(config(tmp_path), seq_len=32)


def test_the_stream_knows_its_tokenizer(built: Built) -> None:
    with open_stream(config(built.path), seq_len=32) as stream:
        loaded = load_tokenizer(stream.tokenizer_dir)
        assert (stream.vocab_size, stream.end_of_document) == (loaded.vocab_size, loaded.end_of_document)
        assert stream.source_names == ("set",)


def test_a_data_set_with_the_earlier_name_of_the_validation_split_is_read() -> None:
    """tests/earlier_version has a data set that was built when the split was called `held_out`."""
    path = Path(__file__).parents[2] / "earlier_version" / "data"
    with open_stream(config(path), seq_len=32) as stream:
        rows_read = sum((batch.samples_B >= 0).sum() for batch in validation(stream, 10_000, 0, 1))
        assert rows_read == 39
        assert len(steps_of(stream, 0, 1)) == 1


def test_the_batch_size_may_change_from_a_step_on_and_every_sample_still_comes_once(
    mixed: DataConfig, expected: list[list[tuple[Any, ...]]]
) -> None:
    """Three starts of 1, 5 and 3 ranks; the second one begins at a sample that is no multiple of its ranks."""
    read: list[tuple[Any, ...]] = []
    states: list[dict[str, Any]] = []
    for first, number, size, ranks in ((0, 4, 24, 1), (4, 5, 10, 5), (9, 3, 24, 3)):
        streams = [open_stream(mixed, seq_len=32) for _ in range(ranks)]
        saved = states
        states = []
        for rank, stream in enumerate(streams):
            with stream:
                if saved:
                    stream.restore(saved)
                steps = stream.steps(
                    first_step=first, global_batch_size=size, micro_batch_size=1, rank=rank, world_size=ranks
                )
                for step in islice(steps, number):
                    read += rows(step)
                states.append(json.loads(json.dumps(stream.state(first + number))))
    assert sorted(read) == [row for step in expected for row in step][: 4 * 24 + 5 * 10 + 3 * 24]
    assert (states[0]["samples"], states[0]["batch_sizes"]) == (218, [[0, 24], [4, 10], [9, 24]])
    plan = plan_of(mixed, 32, 24, states)
    assert plan.batch_sizes.first_sample(12) == 218
    assert audit(plan, 218, (1, 2, 3), states).counters_compared


def test_steps_after_a_change_of_the_batch_size_begin_where_the_last_one_ended(built: Built) -> None:
    state = saved_state(config(built.path))  # three steps of 24
    with open_stream(config(built.path), seq_len=32) as stream:
        stream.restore([state])
        steps = stream.steps(first_step=3, global_batch_size=10, micro_batch_size=1, rank=0, world_size=1)
        assert [min(int(batch.samples_B[0]) for batch in step) for step in islice(steps, 3)] == [72, 82, 92]
        assert stream.first_sample(5) == 92


def test_sources_may_be_added_and_switched_off_between_two_starts(mixed: DataConfig) -> None:
    """The rows before stay the same, and every row of an epoch still comes once (`audit`)."""
    large, small, tiny = (source.path for source in mixed.sources)
    expected, states = [], []
    for paths, weights, first in (
        ((large,), [1], 0),
        ((large, small, tiny), [5, 3, 1], 10),
        ((large, small, tiny), [0, 1, 3], 20),
    ):
        chosen = config(*paths, weights=weights)
        with open_stream(chosen, seq_len=32) as stream:
            if states:
                stream.restore(states)
            expected += [rows(step) for step in steps_of(stream, first, 10)]
            states = [json.loads(json.dumps(stream.state(first + 10)))]
    assert states[0]["weights"] == [[0, [1, 0, 0]], [10 * G, [5, 3, 1]], [20 * G, [0, 1, 3]]]
    sources = [{row[1] for step in expected[first : first + 10] for row in step} for first in (0, 10, 20)]
    assert sources == [{0}, {0, 1, 2}, {1, 2}]
    assert audit(plan_of(chosen, 32, G, states), 30 * G, (1, 2, 3), states).counters_compared
    with open_stream(config(large), seq_len=32) as alone:
        assert [rows(step) for step in steps_of(alone, 0, 10)] == expected[:10]


def test_at_least_one_source_must_have_a_weight() -> None:
    with pytest.raises(ValueError, match="the weight of all sources is 0"):
        config("a", "b", weights=[0, 0])


SCHEDULE: dict[str, Any] = {"batch_changes": ((4, 12), (9, 48)), "seq_lens": ((0, 8), (6, 16), (11, 32))}


def scheduled(stream: Stream, first: int, number: int, rank: int, ranks: int) -> list[list[Batch]]:
    steps = stream.steps(
        first_step=first, global_batch_size=G, micro_batch_size=2, rank=rank, world_size=ranks, **SCHEDULE
    )
    return list(islice(steps, number))


@pytest.mark.parametrize("prefetch", [0, 40])
def test_scheduled_batch_sizes_and_lengths_give_every_token_once_in_the_order_of_whole_rows(
    mixed: DataConfig, prefetch: int
) -> None:
    """Resumed at each kind of step, on other numbers of ranks, the samples continue, and their tokens are all there."""
    chosen = mixed.model_copy(update={"prefetch_batches": prefetch})
    with open_stream(chosen, seq_len=32) as stream:
        whole = {
            int(sample): (batch.tokens_BT[b], batch.labels_BT[b], int(batch.sources_B[b]))
            for step in steps_of(stream, 0, 20)
            for batch in step
            for b, sample in enumerate(batch.samples_B)
        }
    states: list[dict[str, Any]] = []
    expected_sample = 0
    for first, number, ranks in ((0, 5, 2), (5, 4, 1), (9, 3, 3)):
        got: list[list[Batch]] = [[] for _ in range(number)]
        saved = []
        for rank in range(ranks):
            with open_stream(chosen, seq_len=32) as stream:
                if states:
                    stream.restore(states)
                for n, step in enumerate(scheduled(stream, first, number, rank, ranks)):
                    got[n] += step
                saved.append(json.loads(json.dumps(stream.state(first + number))))
        states = saved
        for step, read in enumerate(got, first):
            size = G if step < 4 else 12 if step < 9 else 48
            length = 8 if step < 6 else 16 if step < 11 else 32
            parts = 32 // length
            assert {batch.tokens_BT.shape for batch in read} == {(2 * parts, length)}
            samples = sorted({int(sample) for batch in read for sample in batch.samples_B})
            assert samples == list(range(expected_sample, expected_sample + size))
            expected_sample += size
            for batch in read:
                for b in range(0, 2 * parts, parts):
                    tokens, labels, source = whole[int(batch.samples_B[b])]
                    assert np.array_equal(batch.tokens_BT[b : b + parts].reshape(-1), tokens)
                    assert set(batch.sources_B[b : b + parts]) == {source}
                    shorter = batch.labels_BT[b : b + parts].reshape(-1)
                    kept = shorter != IGNORE
                    assert np.array_equal(shorter[kept], labels[kept])
                    ends = np.arange(32) % length == length - 1
                    assert (kept | (labels == IGNORE) | ends).all(), "only the last token of a row loses its target"
                    assert (batch.positions_BT[b : b + parts, 0] == 0).all()
    merged = merge_states(states)
    assert (merged["samples"], merged["batch_sizes"]) == (expected_sample, [[0, 24], [4, 12], [9, 48]])
    plan = plan_of(chosen, 32, G, states, SCHEDULE["batch_changes"])
    assert audit(plan, expected_sample, (1, 2, 3), states).counters_compared


def test_a_scheduled_batch_size_that_the_ranks_do_not_divide_is_refused(mixed: DataConfig) -> None:
    with (
        open_stream(mixed, seq_len=32) as stream,
        pytest.raises(DataError, match=r"train.global_batch_size \(12\) must be a multiple of .* ranks \(4\)"),
    ):
        scheduled(stream, 0, 1, 0, 4)
