"""Tasks of lm-evaluation-harness, on a checkpoint and on live weights, as its own class finds them on an export."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launch.cli import main
from tests.train.evaluation.task_files import write_tasks
from tests.train.test_loop import STEPS, Job, data  # noqa: F401 - data is a fixture
from train.config import Recipe
from train.errors import ConfigError
from train.exit_codes import FINISHED
from train.records.jsonl import read_jsonl

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library `datasets` keeps what it reads in the home folder, unless it is told otherwise."""
    from datasets import config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "own")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, data: Path, tasks: Path) -> Job:  # noqa: F811
    """A run that evaluates the tasks after steps 5, 10 and 12."""
    job = Job(tmp_path_factory.mktemp("runs"), data)
    tree = job.recipe.model_dump(mode="json")
    tree["train"]["evaluations"] = {"tasks": [str(tasks)], "every": 5}
    job.recipe = Recipe.model_validate(tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        assert job.train(patch) == FINISHED
    return job


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def harness_class() -> Any:
    """The harness's class for Hugging Face models. It imports accelerate, which it uses only to start processes."""
    accelerate, utils = ModuleType("accelerate"), ModuleType("accelerate.utils")
    for name in ("Accelerator", "InitProcessGroupKwargs", "find_executable_batch_size"):
        setattr(accelerate, name, None)
    utils.get_max_memory = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("accelerate") is None:
            patch.setitem(sys.modules, "accelerate", accelerate)
            patch.setitem(sys.modules, "accelerate.utils", utils)
        from lm_eval.models.huggingface import HFLM

        return HFLM


@pytest.fixture(scope="module")
def theirs(job: Job, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the harness's own class for Hugging Face models, on the exported folder."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    exported = tmp_path_factory.mktemp("export") / "exported"
    assert main(["export", str(job.folder), "--out", str(exported)]) == 0
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype="float32")
    words = transformers.AutoTokenizer.from_pretrained(exported)
    model = harness_class()(pretrained=loaded, tokenizer=words, batch_size=2, max_length=32)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    names: list[Any] = sorted(manager.all_subtasks)
    results: Any = simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True)
    return results


def test_the_results_are_those_of_the_harness_on_the_exported_folder(
    job: Job, tasks: Path, theirs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = found(capsys, str(job.folder), "--tasks", str(tasks))
    assert ours["results"].keys() == {"choice", "perplexity", "greedy", "generate"}
    for task, own in ours["results"].items():
        for name, value in own.items():
            expected = theirs["results"][task][name if "," in name else f"{name},none"]
            exact = name.startswith(("acc", "exact"))
            assert value == (expected if exact else pytest.approx(expected, rel=1e-5)), (task, name)
    assert ours["examples"] == dict.fromkeys(ours["results"], 4)


def test_each_log_probability_and_each_text_is_that_of_the_harness(
    job: Job, tasks: Path, theirs: dict[str, Any]
) -> None:
    from lm_eval.evaluator import evaluate

    from train.evaluation import checkpoint
    from train.evaluation.tasks import load_tasks

    seen: dict[str, Any] = {}

    def keep(model: Any, tokenizer: Any, seq_len: int, loaded: Any, limit: Any) -> Any:
        from train.evaluation.language_model import KeepstepLM

        results: Any = evaluate(KeepstepLM(model, tokenizer, seq_len), dict(loaded.loaded), bootstrap_iters=0)
        seen.update(results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "evaluate_tasks", keep)
        checkpoint.evaluate_checkpoint_on_tasks(
            job.folder, [str(tasks)], [], lambda _: None, limit=None, batch_size=3, average=False
        )
    assert load_tasks([str(tasks)]).names == sorted(seen["samples"])
    compared = 0
    for task, samples in seen["samples"].items():
        for ours, other in zip(samples, theirs["samples"][task], strict=True):
            assert _flat(ours["resps"]) == [
                pytest.approx(value, rel=1e-6, abs=1e-5) if isinstance(value, float) else value
                for value in _flat(other["resps"])
            ]
            compared += len(_flat(ours["resps"]))
    assert compared > 30


def _flat(value: Any) -> list[Any]:
    return [leaf for inner in value for leaf in _flat(inner)] if isinstance(value, list | tuple) else [value]


def test_a_run_writes_the_results_of_its_live_weights(
    job: Job, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [r for r in read_jsonl(job.folder / "metrics.jsonl") if any(name.startswith("task/") for name in r)]
    assert [record["step"] for record in records] == [5, 10, STEPS]
    last = found(capsys, str(job.folder), "--tasks", str(tasks))
    expected = {f"task/{task}/{name}": value for task, own in last["results"].items() for name, value in own.items()}
    logged = {name: value for name, value in records[-1].items() if name.startswith("task/")}
    assert logged == pytest.approx(expected, rel=1e-5)
    assert sorted(path.name for path in (job.folder / "tasks").iterdir()) == [
        "step-00000005.json",
        "step-00000010.json",
        f"step-{STEPS:08d}.json",
    ]
    written = json.loads((job.folder / "tasks" / f"step-{STEPS:08d}.json").read_text())
    assert (written["step"], written["weights"], written["limit"]) == (STEPS, "live", None)
    assert written["results"]["choice"]["acc"] == logged["task/choice/acc"]


def test_limit_and_out(job: Job, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path for path in job.folder.rglob("*"))
    out = tmp_path / "results.json"
    limited = found(capsys, str(job.folder), "--tasks", str(tasks), "--limit", "2", "--out", str(out))
    assert set(limited["examples"].values()) == {2}
    assert json.loads(out.read_text())["results"] == limited["results"]
    assert sorted(path for path in job.folder.rglob("*")) == before, "looking changes nothing in a run folder"
    assert main(["eval", str(job.folder), "--tasks", str(tasks), "--limit", "1"]) == 0
    assert "choice" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (["--tasks", "{empty}"], "has no task files"),
        (["--tasks", ","], "--tasks needs names of tasks or folders"),
        (["--tasks", "{tasks}", "--data", "x"], "--tasks needs names of tasks or folders, and no --data"),
        (["--limit", "3"], "--limit belongs to --tasks"),
        (["--tasks", "{broken}"], "broken cannot be loaded"),
        (["--tasks", "{tasks}", "--out", "{tasks}"], "exists; name a new file"),
        (["--tasks", "{tasks}", "--average"], "has no average of weights"),
        (["--tasks", "{sampled}"], "a task asks for sampled texts"),
        (["--tasks", "{long}"], "but the model's context has 32"),
    ],
)
def test_bad_tasks_are_refused_in_one_line(
    job: Job, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: list[str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("broken", "sampled", "long"):
        text = (write_tasks(tmp_path / name) / "generate.yaml").read_text()
        for other in (tmp_path / name).glob("*.yaml"):
            other.unlink()
        replaced = {
            "broken": text.replace(f"{name}/generate.jsonl", "no/such.jsonl"),
            "sampled": text.replace("do_sample: false", "do_sample: true"),
            "long": text.replace("max_gen_toks: 6", "max_gen_toks: 32"),
        }
        (tmp_path / name / "broken.yaml").write_text(replaced[name].replace("task: generate", f"task: {name}"))
    paths = {"tasks": tasks, **{name: tmp_path / name for name in ("empty", "broken", "sampled", "long")}}
    assert main(["eval", str(job.folder), *(one.format_map(paths) for one in case)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert said in error


def test_tensor_parallel_runs_refuse_tasks(job: Job) -> None:
    tree = job.recipe.model_dump(mode="json")
    tree["parallel"] |= {"engine": "fsdp2", "tensor": 2}
    with pytest.raises(ValueError, match=r"train.evaluations.tasks needs whole logits, which parallel.tensor \(2\)"):
        Recipe.model_validate(tree)


def test_a_missing_harness_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from train.evaluation.tasks import load_tasks

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"not installed; install it: pip install 'keepstep\[lm-eval\]'"):
        load_tasks(["hellaswag"])
