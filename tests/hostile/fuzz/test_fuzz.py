"""No mutation of any file that Keepstep reads crashes, hangs, leaves the folder or silently changes a result.

`make fuzz` runs many more inputs (tests/hostile/fuzz)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.fuzz.formats.all import FORMATS
from tests.hostile.fuzz.formats.faulty import FAULTY
from tests.hostile.fuzz.session import Session, session

INPUTS = 12
"""Inputs of each format, the same in every run."""
CPU_SECONDS, WALL_SECONDS = 60, 600.0
"""Limits for a busy machine; `make fuzz` has the limit of 5 seconds."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session(tmp_path_factory.mktemp("fuzz"), CPU_SECONDS, WALL_SECONDS) as found:
        yield found


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file_is_refused_or_changes_nothing(opened: Session, name: str) -> None:
    report = opened.fuzz(FORMATS[name], INPUTS)
    assert report.inputs >= INPUTS // 2, "hypothesis stops early only if there are no more inputs"
    assert not report.findings


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("crash", "KeyError in "),
        ("swell", "swell: took over 500 MB of memory"),
        ("leave", "wrote outside: ['canary/new']"),
        ("publish", "published the secret in out/publish/file"),
        ("other", "other: accepted with another result"),
    ],
)
def test_the_fuzzer_finds_a_fault(opened: Session, name: str, finding: str) -> None:
    found = opened.fuzz(FAULTY[name], 3).findings
    assert any(kind.startswith(finding) for kind in found), found


def test_the_fuzzer_finds_what_never_ends(tmp_path: Path) -> None:
    with session(tmp_path, cpu_seconds=1, wall_seconds=20.0) as impatient:
        assert "spin: ended by SIGXCPU" in impatient.fuzz(FAULTY["spin"], 1).findings
        assert "wait: ended by blocked" in impatient.fuzz(FAULTY["wait"], 1).findings
