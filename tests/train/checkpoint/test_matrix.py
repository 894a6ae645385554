"""Every layout resumes from a checkpoint of every other layout: the tensors have the same bits, and losses agree."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from train.checkpoint.format.reader import Reader

SCRIPT = Path(__file__).with_name("matrix_ranks.py")
LAYOUTS = ["single", "ddp-2", "fsdp-2", "fsdp-4", "hsdp-2x2", "fsdp-2-tp-2", "zero1-2", "zero2-3", "zero3-4"]
PAIRS = [(source, layout) for source in LAYOUTS for layout in LAYOUTS]
ENGINE_TOLERANCE = 1e-5
"""Difference of losses in nats that engines may have in fp32, because they sum in another order."""


@dataclass
class Results:
    folder: Path
    uninterrupted: dict[str, list[float]]
    resumed: dict[tuple[str, str], dict]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("matrix")
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *LAYOUTS],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[3])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    uninterrupted = {line["layout"]: line["losses"] for line in lines if line["kind"] == "uninterrupted"}
    resumed = {(line["source"], line["layout"]): line for line in lines if line["kind"] == "resumed"}
    return Results(folder, uninterrupted, resumed)


def checkpoint(folder: Path) -> Reader:
    (path,) = folder.glob("step-*")
    return Reader(path)


@pytest.mark.parametrize(("source", "layout"), PAIRS)
def test_every_tensor_is_the_same_after_a_load_and_a_save(results: Results, source: str, layout: str) -> None:
    before = checkpoint(results.folder / source)
    after = checkpoint(results.folder / f"{source}-by-{layout}")
    assert after.names() == before.names()
    different = [name for name in before.names() if not np.array_equal(before[name], after[name])]
    assert different == []


@pytest.mark.parametrize(("source", "layout"), PAIRS)
def test_losses_after_a_resume_are_those_of_the_uninterrupted_run(results: Results, source: str, layout: str) -> None:
    expected = results.uninterrupted[source][-2:]
    losses = results.resumed[source, layout]["losses"]
    if source == layout:
        assert losses == expected
    else:
        assert losses == pytest.approx(expected, abs=ENGINE_TOLERANCE)


def test_the_optimizer_has_its_moments_its_averages_and_its_step(results: Results) -> None:
    for layout in LAYOUTS:
        saved = checkpoint(results.folder / layout)
        moments = [name for name in saved.names() if name.endswith((".exp_avg", ".exp_avg_sq"))]
        parameters = [name for name in saved.names() if name.startswith("model.")]
        assert len(moments) == 2 * len(parameters) > 0
        averages = [name for name in saved.names() if name.endswith(".average")]
        assert len(averages) == len(parameters)
        assert all(np.any(saved[name]) for name in (*moments, *averages))
        assert {float(saved[name]) for name in saved.names() if name.endswith(".step")} == {2.0}


def test_all_layouts_save_the_same_names_shapes_and_types(results: Results) -> None:
    def facts(layout: str) -> dict[str, tuple]:
        saved = checkpoint(results.folder / layout)
        return {name: (saved.shape(name), saved.manifest["tensors"][name]["dtype"]) for name in saved.names()}

    assert all(facts(layout) == facts("single") for layout in LAYOUTS)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.startswith(("fsdp", "zero"))])
def test_the_same_layout_reads_no_byte_twice(results: Results, layout: str) -> None:
    manifest = checkpoint(results.folder / layout).manifest
    ranks = len(manifest["files"])
    files = sum(file["bytes"] for file in manifest["files"])
    headers = ranks * sum(file["header_bytes"] for file in manifest["files"])  # a rank checks those of its files
    replicated = sum(4 * ranks for tensor in manifest["tensors"].values() if tensor["shape"] == [])
    assert results.resumed[layout, layout]["bytes_read"] <= files + headers + replicated
