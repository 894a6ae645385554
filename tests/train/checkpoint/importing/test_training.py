"""An imported checkpoint trains: from its step, its tokens and its place in the data; and never from another place."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM

from data_pipeline.build.prepare import BuildOptions, build_dataset
from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from launch.cli import main
from parallel.bootstrap import start
from parallel.environ import read_world
from train import loop
from train.checkpoint.format.reader import Reader
from train.checkpoint.importing.kinds import KINDS
from train.config import Recipe
from train.config_file import load_recipe, recipe_as_yaml
from train.errors import CheckpointError
from train.exit_codes import FINISHED
from train.health.stop import StopRequest
from train.records.jsonl import read_jsonl
from train.start import open_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROOT = Path(__file__).parents[4]
STEP = 40
TOKENS_PER_STEP = 4 * 32
LlamaFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = [path.read_text() for path in sorted(ROOT.glob("train/*.py"))]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_sentencepiece(texts, folder / "tokenizer", vocab_size=512)
    options = BuildOptions(seq_len=32, validation_share=0.1)
    build_dataset([str(folder / "corpus.jsonl")], folder / "data", folder / "tokenizer", options)
    return folder / "data"


@pytest.fixture
def recipe(tmp_path: Path, data: Path) -> Path:
    """A recipe of two steps beyond STEP; its run folder is RUN."""
    settings: dict[str, Any] = {
        "name": "run", "runs_dir": str(tmp_path),
        "model": {"vocab_size": 512, "seq_len": 32, "n_layers": 1, "n_heads": 2, "d_model": 16, "d_ff": 64},
        "data": {"sources": [{"path": str(data)}]},
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "train": {"steps": STEP + 2, "global_batch_size": 4, "micro_batch_size": 2, "eval_sequences": 0},
        "parallel": {"engine": "single", "device": "cpu", "precision": "fp32"},
        "checkpoint": {"background": False},
        "guard": {"on_spike": "rollback", "window": 8},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_as_yaml(Recipe.model_validate(settings)))
    return path


@pytest.fixture
def llama(tmp_path: Path) -> LlamaFolder:
    """A function that saves a small Llama of Hugging Face, with fields of its config changed."""

    def save(**fields: Any) -> Path:
        sizes: dict[str, Any] = {
            "vocab_size": 512, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 32,
        }  # fmt: skip
        LlamaForCausalLM(LlamaConfig(**sizes | fields)).save_pretrained(tmp_path / "theirs")
        return tmp_path / "theirs"

    return save


def tensors_of(llama: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in LlamaForCausalLM.from_pretrained(llama).named_parameters()}


def save_dcp(llama: Path, folder: Path, step: float = STEP) -> Path:
    state: dict[str, Any] = {"train_state": {"step": torch.tensor(int(STEP))}}
    for name, tensor in tensors_of(llama).items():
        state[name] = tensor.detach()
        state |= {f"optim.{name}.exp_avg": 0 * tensor.detach(), f"optim.{name}.exp_avg_sq": 0 * tensor.detach() + 1e-6}
        state[f"optim.{name}.step"] = torch.tensor(step)
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def save_universal(llama: Path, folder: Path) -> Path:
    for name, tensor in tensors_of(llama).items():
        (folder / "zero" / name).mkdir(parents=True)
        flat = tensor.detach().flatten()
        for kind, value in (("fp32", flat), ("exp_avg", 0 * flat), ("exp_avg_sq", 0 * flat + 1e-6)):
            torch.save({"param": value}, folder / "zero" / name / f"{kind}.pt")
        torch.save(torch.tensor(float(STEP)), folder / "zero" / name / "step.pt")
    return folder


def source_of(kind: str, llama: LlamaFolder, folder: Path) -> Path:
    match kind:
        case "dcp":
            return save_dcp(llama(), folder)
        case "universal":
            return save_universal(llama(), folder)
        case _:
            return llama()


def import_it(source: Path, recipe: Path, target: Path, kind: str, *options: str) -> int:
    return main(["checkpoint", "import", str(source), str(recipe), str(target), "--from", kind, "--trust", *options])


def train(recipe: Recipe, on_step: Callable[[Any], None] = lambda run: None) -> list[dict[str, Any]]:
    """Train to the end as `python -m train` does; returns the records of the steps."""
    folder = Path(recipe.runs_dir) / recipe.name
    folder.mkdir(exist_ok=True)
    with open_run(recipe, start(recipe.parallel, read_world({})), StopRequest(folder / "STOP")) as run:
        on_step(run)
        assert loop.train(run) == FINISHED
    return [record for record in read_jsonl(folder / "metrics.jsonl") if "loss" in record]


@pytest.mark.parametrize(("kind", "step"), [("huggingface", 0), ("dcp", STEP), ("universal", STEP)])
def test_each_kind_trains_from_its_step_tokens_and_place_in_the_data(
    kind: str, step: int, recipe: Path, tmp_path: Path, llama: LlamaFolder
) -> None:
    source = source_of(kind, llama, tmp_path / "source")
    assert import_it(source, recipe, tmp_path / "run", kind) == 0
    imported = Reader(tmp_path / f"run/checkpoints/step-{step:08d}").manifest
    assert imported["tokens"] == step * TOKENS_PER_STEP
    records = train(load_recipe(recipe, [f"train.steps={step + 3}"]))
    assert [record["step"] for record in records] == [step + 1, step + 2, step + 3]
    assert [record["data_step"] for record in records] == [step + 1, step + 2, step + 3]
    assert records[-1]["tokens"] == (step + 3) * TOKENS_PER_STEP
    (state,) = Reader(tmp_path / f"run/checkpoints/step-{step + 3:08d}").manifest["rank_states"]
    assert state["samples"] == (step + 3) * 4


def test_a_new_run_starts_from_the_weights_alone_of_another_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(load_recipe(recipe, ["train.steps=4"]))
    assert import_it(tmp_path / "run", recipe, tmp_path / "new", "keepstep") == 0
    theirs, ours = (
        Reader(tmp_path / name) for name in ("run/checkpoints/step-00000004", "new/checkpoints/step-00000000")
    )
    assert (theirs["model.embed.weight"] == ours["model.embed.weight"]).all()
    assert not ours["optim.embed.weight.exp_avg"].any()
    records = train(load_recipe(recipe, ["train.steps=3", "name=new", "model.seq_len=16", "optim.lr=1e-4"]))
    assert [(record["step"], record["data_step"]) for record in records] == [(1, 1), (2, 2), (3, 3)]
    capsys.readouterr()
    recipe.write_text(recipe_as_yaml(load_recipe(recipe, ["model.n_heads=4"])))
    assert import_it(tmp_path / "run", recipe, tmp_path / "other", "keepstep") == 2
    assert "model.n_heads is 4 in the recipe, 2 in the source" in capsys.readouterr().err


def test_the_first_loss_is_that_of_the_imported_weights(recipe: Path, tmp_path: Path, llama: LlamaFolder) -> None:
    source = llama(initializer_range=0.5)
    assert import_it(source, recipe, tmp_path / "run", "huggingface") == 0
    imported = train(load_recipe(recipe, ["train.steps=3"]))
    anew = train(load_recipe(recipe, ["train.steps=3", "name=anew"]))
    assert abs(imported[0]["loss"] - anew[0]["loss"]) > 0.1


def test_a_run_rolls_back_to_an_imported_checkpoint(recipe: Path, tmp_path: Path, llama: LlamaFolder) -> None:
    assert import_it(save_dcp(llama(), tmp_path / "dcp"), recipe, tmp_path / "run", "dcp") == 0

    def make_the_first_step_a_spike(run: Any) -> None:
        run.guard._norms = [1e-6] * 8

    records = train(load_recipe(recipe), make_the_first_step_a_spike)
    events = [event["kind"] for event in read_jsonl(tmp_path / "run/events.jsonl")]
    assert "rolled_back" in events
    assert records[-1]["step"] == STEP + 2


def test_a_run_with_another_model_than_the_imported_one_is_refused(
    recipe: Path, tmp_path: Path, llama: LlamaFolder
) -> None:
    assert import_it(llama(), recipe, tmp_path / "run", "huggingface") == 0
    with pytest.raises(CheckpointError, match=r"model.rope_theta: 10000.0 in the checkpoint, 500000.0 in this run"):
        train(load_recipe(recipe, ["model.rope_theta=500000"]))


def test_run_and_its_folder_of_checkpoints_mean_the_same(recipe: Path, tmp_path: Path, llama: LlamaFolder) -> None:
    source = llama()
    for target in (tmp_path / "a", tmp_path / "b/checkpoints"):
        assert import_it(source, recipe, target, "huggingface") == 0
    assert (tmp_path / "a/checkpoints/step-00000000").is_dir()
    assert (tmp_path / "b/checkpoints/step-00000000").is_dir()
    assert (tmp_path / "a/recipe.yaml").is_file()
    assert (tmp_path / "b/recipe.yaml").is_file()


def test_a_run_with_a_checkpoint_of_this_step_or_a_later_one_is_refused(
    recipe: Path, tmp_path: Path, llama: LlamaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    source = llama()
    assert import_it(save_dcp(source, tmp_path / "dcp"), recipe, tmp_path / "run", "dcp") == 0
    for kind, folder, step in (("huggingface", source, 0), ("dcp", tmp_path / "dcp", STEP)):
        assert import_it(folder, recipe, tmp_path / "run", kind) == 2
        assert f"has a checkpoint of step 40, but the imported one has step {step}" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000040"]


@pytest.mark.parametrize("named_by", ["the recipe", "the run"])
def test_a_run_with_a_later_checkpoint_in_its_fast_tier_is_refused(
    named_by: str, recipe: Path, tmp_path: Path, llama: LlamaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = load_recipe(recipe, [f"checkpoint.local_dir={tmp_path / 'node'}", "checkpoint.local_every=2"])
    train(fast.model_copy(update={"train": fast.train.model_copy(update={"steps": 3})}))
    shutil.rmtree(tmp_path / "run/checkpoints")  # the fast tier alone has a step, 2
    if named_by == "the recipe":
        (tmp_path / "run/recipe.yaml").unlink()
        recipe.write_text(recipe_as_yaml(fast))
    assert import_it(llama(), recipe, tmp_path / "run", "huggingface") == 2
    said = capsys.readouterr().err
    assert "(checkpoint.local_dir) has a checkpoint of step 2, but the imported one has step 0" in said
    assert not (tmp_path / "run/checkpoints").exists()
    assert import_it(llama(), recipe, tmp_path / "another", "huggingface") == 0  # its tier is another folder


@pytest.mark.parametrize("step", [-3.0, 1e30, 2.5, float("nan"), float("inf")])
def test_a_step_that_is_none_is_refused(
    step: float, recipe: Path, tmp_path: Path, llama: LlamaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_dcp(llama(), tmp_path / "dcp", step)
    assert import_it(source, recipe, tmp_path / "run", "dcp") == 2
    assert "a step is a whole number from 0 to" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_moments_without_a_step_start_anew(
    recipe: Path, tmp_path: Path, llama: LlamaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_universal(llama(), tmp_path / "universal")
    for path in source.glob("zero/*/step.pt"):
        path.unlink()
    assert import_it(source, recipe, tmp_path / "run", "universal") == 0
    assert "the source has moments but no step" in capsys.readouterr().err
    reader = Reader(tmp_path / "run/checkpoints/step-00000000")
    assert not reader["optim.embed.weight.exp_avg_sq"].any()


def test_an_untied_head_is_never_dropped(
    recipe: Path, tmp_path: Path, llama: LlamaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    untied = llama(tie_word_embeddings=False)
    assert import_it(untied, recipe, tmp_path / "run", "huggingface") == 2
    assert "model.tied_embeddings is True in the recipe, False in the source" in capsys.readouterr().err
    assert import_it(save_dcp(untied, tmp_path / "dcp"), recipe, tmp_path / "run", "dcp") == 2
    assert "has an output head of its own" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_rows_of_real_tokens_are_never_dropped(
    recipe: Path, tmp_path: Path, llama: LlamaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_dcp(llama(vocab_size=520), tmp_path / "dcp")
    assert import_it(source, recipe, tmp_path / "run", "dcp") == 2
    assert "has 520 rows" in capsys.readouterr().err


def test_without_a_recipe_the_import_writes_one_that_trains(
    recipe: Path, data: Path, tmp_path: Path, llama: LlamaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    source = llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, tie_word_embeddings=False)
    command = ["checkpoint", "import", str(source), str(tmp_path / "mine"), "--from", "huggingface", "--check"]
    assert main(command) == 0
    assert "logits agree with transformers" in capsys.readouterr().err
    written = load_recipe(tmp_path / "mine/recipe.yaml")
    assert (written.model.rope_theta, written.model.tied_embeddings, written.model.seq_len) == (5e5, False, 32)
    overrides = [f"data.sources.0.path={data}", "train.steps=2", "train.global_batch_size=2", "optim.warmup_steps=1"]
    overrides += ["parallel.engine=single", "parallel.device=cpu", "parallel.precision=fp32", "train.eval_sequences=0"]
    assert [r["step"] for r in train(load_recipe(tmp_path / "mine/recipe.yaml", overrides))] == [1, 2]
    assert main(command) == 2
    assert "has a recipe.yaml already" in capsys.readouterr().err


def test_without_a_recipe_a_source_that_states_no_model_is_refused(
    tmp_path: Path, llama: LlamaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_dcp(llama(), tmp_path / "dcp")
    assert main(["checkpoint", "import", str(source), str(tmp_path / "mine"), "--from", "dcp", "--trust"]) == 2
    assert "has no config.json of transformers, from which a recipe could be written" in capsys.readouterr().err


def test_config_json_beside_another_kind_is_compared_too(
    recipe: Path, tmp_path: Path, llama: LlamaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_dcp(llama(rms_norm_eps=1e-3), tmp_path / "dcp")
    (source / "config.json").write_bytes((tmp_path / "theirs/config.json").read_bytes())
    assert import_it(source, recipe, tmp_path / "run", "dcp") == 2
    assert "model.norm_eps is 1e-05 in the recipe, 0.001 in the source" in capsys.readouterr().err


def test_check_refuses_logits_that_differ_and_saves_nothing(
    recipe: Path,
    tmp_path: Path,
    llama: LlamaFolder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = llama(hidden_act="gelu", initializer_range=0.5)
    monkeypatch.setattr("train.checkpoint.importing.config_json._other_values", lambda *_: [])
    assert import_it(source, recipe, tmp_path / "run", "huggingface", "--check") == 2
    assert "does not compute what transformers computes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_another_kind_is_refused_in_one_line(
    kind: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert import_it(tmp_path / "empty", recipe, tmp_path / "run", kind) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_damaged_files_are_refused_in_one_line(
    recipe: Path, tmp_path: Path, llama: LlamaFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    source = llama()
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    assert import_it(source, recipe, tmp_path / "run", "huggingface") == 2
    (source / ".metadata").write_bytes(b"no pickle")
    assert import_it(source, recipe, tmp_path / "run", "dcp") == 2
    for line in capsys.readouterr().err.splitlines():
        assert "cannot be read as a" in line
