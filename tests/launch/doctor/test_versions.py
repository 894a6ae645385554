"""Findings about versions."""

import pytest

from launch.doctor.versions import KNOWN_BAD, installed, numbers, version_findings

GOOD = {
    "torch": "2.13.0+cu130",
    "deepspeed": "0.19.8",
    "mpi4py": "4.1.2",
    "cuda": "13.0",
    "nccl": "2.29.7",
    "driver": "580.82.07",
    "kernel": "6.8.0-85-generic",
}


def problems(changed: dict[str, str], machine: str = "x86_64") -> list[str]:
    findings = version_findings(GOOD | changed, "3.11.7", machine)
    return [finding.what for finding in findings if finding.level == "problem"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"torch": "2.9.1"}, ["torch 2.9.1"]),
        ({"torch": ""}, ["torch is not installed"]),
        ({"deepspeed": "0.17.1"}, ["deepspeed 0.17.1"]),
        ({"deepspeed": "0.18.2"}, ["deepspeed 0.18.2", "deepspeed 0.18.2"]),
        ({"deepspeed": "0.19.3"}, ["deepspeed 0.19.3", "deepspeed 0.19.3 with torch 2.13.0+cu130"]),
        ({"driver": "575.57.08"}, ["cuda 13.0 with driver 575.57.08"]),
        ({"driver": "575.57.08", "cuda": "12.8"}, []),
        ({"nccl": "2.29.2"}, ["nccl 2.29.2"]),
        ({"nccl": "2.28.9"}, []),
        ({"nccl": "", "driver": "", "cuda": ""}, []),
    ],
)
def test_versions_that_fail_are_reported(changed: dict[str, str], expected: list[str]) -> None:
    assert problems(changed) == expected


def test_failures_of_one_architecture_are_reported_only_there() -> None:
    assert problems({"nccl": "2.28.9"}, "aarch64") == ["nccl 2.28.9 on aarch64"]
    assert problems({"nccl": "2.29.3"}, "aarch64") == []


@pytest.mark.parametrize(("changed", "what"), [({"driver": "560.35.03", "cuda": "12.8"}, "driver 560.35.03")])
def test_a_single_report_is_a_note_that_cites_it(changed: dict[str, str], what: str) -> None:
    notes = [f for f in version_findings(GOOD | changed, "3.11.7", "x86_64") if f.level == "note"]
    assert [note.what for note in notes] == [f"nccl 2.29.7 with {what}"]
    assert notes[0].do.endswith("; https://github.com/dmlc/xgboost/issues/11242")


def test_each_row_can_apply_and_cites_its_report() -> None:
    for row in KNOWN_BAD:
        low = {name: first or before or "1" for name, (first, before) in row.versions.items()}
        below = {name: _just_below(*bounds) for name, bounds in row.versions.items()}
        found = version_findings(GOOD | low | below, "3.11.7", row.machine or "x86_64")
        assert row.source in " ".join(finding.do for finding in found)
        assert row.source.startswith("https://github.com/")
        assert row.why


def _just_below(first: str, before: str) -> str:
    return first or (f"{int(before.partition('.')[0]) - 1}.99" if before else "2.29.7")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.13.0+cu130", (2, 13, 0)), ("6.1.0-18-amd64", (6, 1, 0)), ("22.05.8", (22, 5, 8)), ("30 sec", (30,)), ("", ())],
)
def test_versions_are_compared_by_their_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert numbers(text) == expected


def test_installed_versions_are_found_without_an_import() -> None:
    import torch

    found = installed()
    assert found["torch"] == torch.__version__
    assert found["cuda"] == (torch.version.cuda or "")
