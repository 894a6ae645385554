"""A converted checkpoint is read by the other system, and comes back with the same bits."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from launch.cli import main
from train.checkpoint.conversion.kinds import KINDS
from train.checkpoint.format.attachments import plain_files
from train.checkpoint.format.reader import Reader
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.config import CheckpointConfig, Recipe
from train.model.gpt import GPT
from train.optim.groups import build_optimizer
from train.start import identity_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*DeepSpeed:"),
]
RECIPE: dict[str, Any] = {
    "name": "small",
    "model": {"vocab_size": 320, "seq_len": 32, "n_layers": 2, "n_heads": 2, "d_model": 16, "tied_embeddings": False},
    "data": {"sources": [{"path": "a-data-set-that-is-gone"}]},
    "optim": {"lr": 1e-3, "warmup_steps": 0},
    "train": {"steps": 9, "global_batch_size": 2, "micro_batch_size": 1},
}
FROM = {"dcp": ["--from", "dcp"], "deepspeed-universal": ["--from", "universal", "--trust"]}


@pytest.fixture(scope="module", params=["adamw", "muon"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 7 with random weights and moments."""
    root = tmp_path_factory.mktemp("convert")
    train_sentencepiece(["the cat sat on the mat; the dog sat\n"] * 50, root / "tokenizer", vocab_size=290)
    recipe = Recipe.model_validate(RECIPE | {"optim": RECIPE["optim"] | {"algorithm": request.param}})
    torch.manual_seed(1)
    model = GPT(recipe.model)
    optimizer = build_optimizer(model, recipe.optim)
    optimizer.create_state()
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for kind, tensor in optimizer.state[parameter].items():
            state[f"optim.{name}.{kind}"] = torch.tensor(7.0) if kind == "step" else torch.rand_like(tensor)
    manager = CheckpointManager(
        root / "run" / "checkpoints",
        CheckpointConfig(background=False),
        identity_of(recipe),
        lambda *_, **__: None,
        recipe=recipe.model_dump(mode="json"),
        attachments=plain_files(root / "tokenizer"),
    )
    manager.save(SavedProgress(7, 7 * 2 * 32), state, {})
    manager.close()
    return root / "run" / "checkpoints" / "step-00000007"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_moments_come_back_with_the_same_bits(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "converted"
    assert main(["checkpoint", "convert", str(checkpoint), str(out), "--to", kind]) == 0
    arguments = [str(out), str(out / "recipe.yaml"), str(tmp_path / "back"), *FROM[kind]]
    assert main(["checkpoint", "import", *arguments]) == 0
    before, after = Reader(checkpoint), Reader(tmp_path / "back" / "checkpoints" / "step-00000007")
    assert sorted(before.names()) == sorted(after.names())
    for name in before.names():
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    assert before.manifest["tokens"] == after.manifest["tokens"]
    assert main(["generate", str(tmp_path / "back"), "--prompt", "the cat", "--tokens", "2"]) == 0


def test_torch_itself_loads_the_dcp_folder_into_a_model_and_its_optimizer(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "converted"
    assert main(["checkpoint", "convert", str(checkpoint), str(out), "--to", "dcp"]) == 0
    recipe = Recipe.model_validate(RECIPE)
    model = GPT(recipe.model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # creates its state
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    reader = Reader(checkpoint)
    stored = {f"state.{name.removeprefix('optim.')}" for name in reader.names() if name.startswith("optim.")}
    wanted = {"model": get_model_state_dict(model), "optimizer": {name: moments[name] for name in stored}}
    dcp.load(wanted, checkpoint_id=out, no_dist=True)
    for name, weight in wanted["model"].items():
        np.testing.assert_array_equal(weight.numpy(), reader[f"model.{name}"])
    for name, moment in wanted["optimizer"].items():
        assert isinstance(moment, torch.Tensor)
        np.testing.assert_array_equal(moment.numpy(), reader[f"optim.{name.removeprefix('state.')}"])


DEEPSPEED = """
import os, sys, warnings, torch, deepspeed
warnings.simplefilter("ignore")
from train.config_file import load_recipe
from train.model.gpt import GPT
deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed("gloo", verbose=False, auto_mpi_discovery=False)
folder, stage, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = GPT(load_recipe(folder + "/recipe.yaml").model)
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), dist_init_required=False,
    config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True, "checkpoint": {"load_universal": True}},
)
engine.load_checkpoint(folder)
found = {"steps": engine.global_steps}
for name, parameter in engine.module.named_parameters():
    found["model." + name] = deepspeed.utils.safe_get_full_fp32_param(parameter)
    for kind in ("exp_avg", "exp_avg_sq"):
        found[f"optim.{name}.{kind}"] = deepspeed.utils.safe_get_full_optimizer_state(parameter, kind)
torch.save(found, out)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("checkpoint", ["adamw"], indirect=True)
def test_deepspeed_itself_loads_the_universal_folder(checkpoint: Path, stage: int, tmp_path: Path) -> None:
    out = tmp_path / "converted"
    assert main(["checkpoint", "convert", str(checkpoint), str(out), "--to", "deepspeed-universal"]) == 0
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4]), "OMP_NUM_THREADS": "1"}
    environment |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}  # DeepSpeed reads these
    arguments = [sys.executable, "-c", DEEPSPEED, str(out), str(stage), str(tmp_path / "found.pt")]
    run = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600)
    assert (tmp_path / "found.pt").is_file(), run.stdout[-3000:] + run.stderr[-5000:]
    found, reader = torch.load(tmp_path / "found.pt", weights_only=True), Reader(checkpoint)
    assert found.pop("steps") == 7
    assert set(found) == {name for name in reader.names() if not name.endswith(".step")}
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.numpy(), reader[name], err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["damaged", "exists", "no checkpoint", "tokenizer"])
def test_what_cannot_be_converted_is_refused_in_one_line_and_leaves_nothing(
    fault: str, kind: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "step-00000007"
    shutil.copytree(checkpoint, source)
    match fault:
        case "damaged":
            shard = source / "shard-00000.safetensors"
            content = bytearray(shard.read_bytes())
            content[-1] ^= 1
            shard.write_bytes(content)
            expected = "is damaged: shard-00000.safetensors"
        case "exists":
            (tmp_path / "out").mkdir()
            expected = "out exists; name a new folder"
        case "tokenizer":
            (source / "tokenizer" / "tokenizer.model").unlink()
            expected = "tokenizer/tokenizer.model"
        case _:
            shutil.rmtree(source)
            expected = "is not a checkpoint and has none"
    capsys.readouterr()
    assert main(["checkpoint", "convert", str(source), str(tmp_path / "out"), "--to", kind]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= ({"step-00000007", "out"} if fault == "exists" else {"step-00000007"})
