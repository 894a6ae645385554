import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.errors import DataError, StorageError
from data_pipeline.shards import storage
from data_pipeline.shards.storage import Span, open_storage, read_checked
from tests.data_pipeline.servers import Faults, http_server

CONTENT = bytes(range(256)) * 20


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FIRST_PAUSE_SECONDS", 0.001)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Faults]]:
    (tmp_path / "a.shard").write_bytes(CONTENT)
    (tmp_path / "b.shard").write_bytes(CONTENT[::-1])
    with http_server(tmp_path) as (address, faults):
        yield address, faults


def accept(number: int, data: bytes | memoryview) -> str | None:
    """A check that all bytes pass."""
    return None


@pytest.mark.parametrize("where", ["local", "http"])
def test_ranges_of_several_files_are_read_in_one_call(served: tuple[str, Faults], tmp_path: Path, where: str) -> None:
    address = str(tmp_path) if where == "local" else served[0]
    spans = [Span("a.shard", 10, 20), Span("b.shard"), Span("a.shard", 5110, 5120)]
    answers = read_checked([open_storage(address)], spans, accept)
    assert [bytes(answer) for answer in answers if not isinstance(answer, DataError)] == [
        CONTENT[10:20],
        CONTENT[::-1],
        CONTENT[5110:],
    ]


def test_only_the_range_is_transferred_and_requests_run_in_parallel(served: tuple[str, Faults]) -> None:
    address, faults = served
    faults.together = threading.Barrier(3)
    read_checked([open_storage(address)], [Span("a.shard", 10 * n, 10 * n + 10) for n in range(6)], accept)
    assert sorted(faults.requests) == [f"/a.shard bytes={10 * n}-{10 * n + 9}" for n in range(6)]
    assert faults.most_parallel > 2


@pytest.mark.parametrize("fault", ["errors", "cuts", "short", "flips"])
def test_a_read_that_fails_is_tried_again(served: tuple[str, Faults], fault: str) -> None:
    address, faults = served
    setattr(faults, fault, 3)

    def check(number: int, data: bytes | memoryview) -> str | None:
        return None if bytes(data) == CONTENT[100:200] else "the checksum is wrong"

    (answer,) = read_checked([open_storage(address)], [Span("a.shard", 100, 200)], check)
    assert answer == CONTENT[100:200]
    assert len(faults.requests) == 4


def test_a_read_that_fails_every_time_gives_an_error_with_address_and_cause(served: tuple[str, Faults]) -> None:
    address, faults = served
    faults.errors = 100
    (answer,) = read_checked([open_storage(address)], [Span("a.shard", 100, 200)], accept)
    assert isinstance(answer, StorageError)
    assert f"cannot read {address}/a.shard, bytes 100 to 200: 503" in str(answer)
    assert len(faults.requests) == storage.ATTEMPTS


def test_only_the_reads_that_failed_are_repeated(served: tuple[str, Faults]) -> None:
    address, faults = served
    faults.errors = 1
    read_checked([open_storage(address)], [Span("a.shard", 0, 9), Span("b.shard", 0, 9)], accept)
    assert len(faults.requests) == 3


def test_the_mirror_is_read_after_all_retries_fail(served: tuple[str, Faults], tmp_path: Path) -> None:
    address, faults = served
    faults.errors = 100
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "a.shard").write_bytes(CONTENT)
    storages = [open_storage(address), open_storage(str(tmp_path / "mirror"))]
    (answer,) = read_checked(storages, [Span("a.shard", 1, 4)], accept)
    assert not isinstance(answer, DataError)
    assert bytes(answer) == CONTENT[1:4]


@pytest.mark.parametrize("where", ["local", "http"])
def test_a_file_that_is_too_short_gives_an_error(served: tuple[str, Faults], tmp_path: Path, where: str) -> None:
    address = str(tmp_path) if where == "local" else served[0]
    (answer,) = read_checked([open_storage(address)], [Span("a.shard", 5000, 6000)], accept)
    assert isinstance(answer, DataError)
    assert isinstance(answer, StorageError) == (where == "http"), "a local file that is too short stays so"
    assert "got 120 bytes instead of 1000" in str(answer)


def test_a_missing_file_gives_an_error(tmp_path: Path) -> None:
    (answer,) = read_checked([open_storage(str(tmp_path))], [Span("none", 0, 1)], accept)
    assert isinstance(answer, DataError)
    assert not isinstance(answer, StorageError), "another attempt does not help"
    assert "No such file" in str(answer)


def test_an_address_with_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(DataError, match=r"cannot open what://ever: Protocol not known"):
        open_storage("what://ever")
