"""The finder of shown commands sees them all, and refuses what does not parse."""

from pathlib import Path

import pytest

from tests.docs.shown_commands import command_blocks, commands, inline_problem, problem

PAGE = """
# Title

<!-- run -->
```bash
# a comment
keepstep data show data/main \\
  --json   # a remark
job=$(sbatch --parsable slurm/train.sbatch)
```

Text with `keepstep status RUN`.

<!-- not run: needs a GPU -->
```console
$ keepstep stop runs/a
stopped
$ make test > log && make lint
```

```text
keepstep is no command here
```
"""


def test_commands_are_found_with_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    first, second = command_blocks(page)
    assert (first.mark, second.mark) == ("<!-- run -->", "<!-- not run: needs a GPU -->")
    assert list(commands(first.script)) == [
        ["keepstep", "data", "show", "data/main", "--json"],
        ["sbatch", "--parsable", "slurm/train.sbatch"],
    ]
    assert list(commands(second.script)) == [
        ["keepstep", "stop", "runs/a"],
        ["make", "test"],
        ["make", "lint"],
    ]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("keepstep runn recipes/laptop.yaml", "no command runn"),
        ("keepstep run recipes/laptop.yaml --rank 2 --nope", "--nope"),
        ("keepstep run recipes/laptop.yaml --nodes N", "--nodes (N) must be a whole number"),
        ("keepstep run recipes/laptop.yaml train.step=4", "no setting train.step"),
        ("keepstep run recipes/desktop.yaml", "recipes/desktop.yaml does not exist"),
        ("mpirun -n 2 keepstep data bild", "invalid choice: 'bild'"),
        ("torchrun --nproc-per-node 2 -m train recipes/laptop.yaml --resume", "no option --resume"),
        ("python -m trane recipes/laptop.yaml", "no module trane"),
        ("make tests", "no target tests"),
    ],
)
def test_a_command_that_would_be_refused_is_reported(command: str, reason: str) -> None:
    (words,) = commands(command)
    assert reason in problem(words)


@pytest.mark.parametrize(
    "command",
    [
        "keepstep run recipes/laptop.yaml --ranks 2 train.steps=50 data.sources.0.path=data/main",
        "keepstep data build INPUT ... --out data/main --tokenizer data/tokenizer",
        "deepspeed --no_local_rank --module train RECIPE",
        "srun python -m train RECIPE",
        "make -j2 test",
        "tensorboard --logdir runs",
    ],
)
def test_a_command_that_parses_is_accepted(command: str) -> None:
    (words,) = commands(command)
    assert problem(words) == ""


def test_inline_commands_may_lack_arguments_but_not_exist() -> None:
    assert inline_problem(["keepstep", "run", "RECIPE", "--nodes", "N"]) == ""
    assert inline_problem(["keepstep", "data", "build", "--out"]) == ""
    assert inline_problem(["keepstep", "COMMAND", "--help"]) == ""
    assert "no option --node" in inline_problem(["keepstep", "run", "RECIPE", "--node", "N"])
    assert "no subcommand bild" in inline_problem(["keepstep", "data", "bild"])
