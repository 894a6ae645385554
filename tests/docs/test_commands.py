"""Every command in README.md and docs/ parses, and is executed by a test or marked as not run (CONTRIBUTING.md)."""

import ast
import gzip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.corpus import gather
from tests.docs.shown_commands import (
    MARK,
    PAGES,
    ROOT,
    blocks,
    command_blocks,
    commands,
    inline_commands,
    inline_problem,
    problem,
)

CORPUS_BYTES = 1_000_000
BLOCK_SECONDS = 600
TINY = {
    "model": {"vocab_size": 2048, "seq_len": 64, "n_layers": 2, "n_heads": 2, "d_model": 32},
    "train": {"steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "eval_every": 3, "eval_sequences": 8},
    "optim": {"lr": "2e-3", "warmup_steps": 2},
    "checkpoint": {"every": 3},
}
"""Sections of recipes/laptop.yaml in the folder where blocks are executed."""
PREPARATIONS = {
    "data": (
        "keepstep data tokenizer texts/*.jsonl.gz --out data/tokenizer --vocab-size 2048",
        "keepstep data build texts/*.jsonl.gz --out data/main --tokenizer data/tokenizer --seq-len 64",
    ),
    "run": ("keepstep run recipes/laptop.yaml data.sources.0.path=data/main",),
}
"""What a page can ask for with `<!-- prepare: NAME -->`; `run` includes `data`."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_every_block_names_its_language_and_every_command_block_has_a_mark(page: Path) -> None:
    for block in blocks(page):
        assert block.language, f"{block}: name a language, such as text, bash or console"
        if block.language in ("bash", "console"):
            assert MARK.fullmatch(block.mark), (
                f"{block}: put <!-- run -->, run by or not run above it, not {block.mark!r}"
            )


@pages
def test_every_command_parses(page: Path) -> None:
    for block in command_blocks(page):
        for words in commands(block.script):
            assert not problem(words), f"{block}: {' '.join(words)}: {problem(words)}"


@pages
def test_every_command_in_the_text_exists(page: Path) -> None:
    for words in inline_commands(page):
        assert not inline_problem(words), f"{page.name}: {' '.join(words)}: {inline_problem(words)}"


@pages
def test_every_test_that_a_mark_names_exists(page: Path) -> None:
    for block in command_blocks(page):
        mark = MARK.fullmatch(block.mark)
        if mark is not None and mark["kind"] == "run by":
            for test in mark["rest"].split():
                assert is_test(test), f"{block}: there is no test {test}"


def is_test(identifier: str) -> bool:
    """Returns whether a test such as `tests/launch/test_cli.py::test_name` exists."""
    file, _, name = identifier.partition("::")
    if not (ROOT / file).is_file():
        return False
    functions = [
        node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
    ]
    return not name or name in functions


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipes, job scripts and a small corpus, as CONTRIBUTING.md describes it."""
    folder = tmp_path_factory.mktemp("commands")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    shutil.copytree(ROOT / "slurm", folder / "slurm")
    laptop = yaml.safe_load((ROOT / "recipes" / "laptop.yaml").read_text())
    laptop["parallel"]["device"] = "cpu"
    (folder / "recipes" / "laptop.yaml").write_text(yaml.safe_dump(laptop | TINY))
    (folder / "texts").mkdir()
    gather(folder / "corpus.jsonl", CORPUS_BYTES)
    lines = (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for part in range(2):
        with gzip.open(folder / "texts" / f"part-{part}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(lines[part::2])
    (folder / "corpus.jsonl").unlink()
    return folder


@pytest.fixture(scope="module")
def prepared(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder with a data set and a finished run."""
    folder = tmp_path_factory.mktemp("prepared") / "folder"
    shutil.copytree(workplace, folder)
    for preparation in PREPARATIONS.values():
        execute("\n".join(preparation), folder)
    return folder


executed = [page for page in PAGES if any(block.mark == "<!-- run -->" for block in command_blocks(page))]


@pytest.mark.parametrize("page", executed, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_that_are_marked_run_succeed(
    page: Path, workplace: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    wanted = re.findall(r"<!-- prepare: (\w+) -->", page.read_text(encoding="utf-8"))
    source = request.getfixturevalue("prepared") if wanted else workplace
    folder = tmp_path / "folder"
    shutil.copytree(source, folder, ignore=None if "run" in wanted else shutil.ignore_patterns("runs"))
    for block in command_blocks(page):
        if block.mark == "<!-- run -->":
            execute(block.script, folder, str(block))


def execute(script: str, folder: Path, name: str = "preparation") -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BLOCK_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{name}:\n{script}\n{done.stdout}"
