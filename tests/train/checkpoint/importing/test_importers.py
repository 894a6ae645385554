"""An imported checkpoint of another system computes what its source computes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from launch.cli import main
from parallel.engine import CheckpointTensor
from train.checkpoint.format.reader import Reader
from train.checkpoint.importing.importers import identity_of
from train.checkpoint.importing.kinds import KINDS
from train.checkpoint.importing.names import TORCHTITAN
from train.checkpoint.manager import CheckpointManager
from train.config import CheckpointConfig
from train.config_file import load_recipe, recipe_as_yaml
from train.model.config import ModelConfig
from train.model.gpt import GPT
from train.optim.groups import build_optimizer
from train.records.progress import Progress

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*DeepSpeed:"),
]
SIZES: dict[str, Any] = {"vocab_size": 48, "seq_len": 16, "n_layers": 2, "n_heads": 4, "d_model": 32, "d_ff": 64}
LLAMA = ModelConfig(**SIZES, n_kv_heads=2, tied_embeddings=False)
GPT2 = ModelConfig(**SIZES, positions="learned", norm="layernorm", activation="gelu", bias=True, tied_embeddings=True)
TOKENS = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def recipe(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The laptop recipe with the model of the test."""
    model: ModelConfig = request.param
    laptop = load_recipe(Path(__file__).parents[4] / "recipes" / "laptop.yaml")
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_as_yaml(laptop.model_copy(update={"model": model})))
    return path


def logits(folder: Path, config: ModelConfig) -> torch.Tensor:
    reader, model = Reader(folder), GPT(config)
    weights = {name[6:]: torch.from_numpy(reader[name]) for name in reader.names() if name.startswith("model.")}
    model.load_state_dict(weights, strict=not config.tied_embeddings)
    positions = torch.arange(16).expand_as(TOKENS)
    with torch.no_grad():
        return model(TOKENS, positions, torch.zeros_like(TOKENS))


@pytest.mark.parametrize("recipe", [LLAMA], indirect=True)
def test_an_imported_llama_of_hugging_face_computes_the_same(recipe: Path, tmp_path: Path) -> None:
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=16,
        )
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs")
    target = str(tmp_path / "run/checkpoints")
    assert main(["checkpoint", "import", str(tmp_path / "theirs"), str(recipe), target, "--from", "huggingface"]) == 0
    ours = logits(tmp_path / "run/checkpoints/step-00000000", LLAMA)[..., :40]
    with torch.no_grad():
        assert torch.allclose(ours, theirs(TOKENS).logits, atol=1e-5)


@pytest.mark.parametrize("recipe", [GPT2], indirect=True)
def test_an_imported_gpt2_of_hugging_face_computes_the_same(recipe: Path, tmp_path: Path) -> None:
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=32, n_inner=64, n_layer=2, n_head=4, n_positions=16)
    ).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    target = str(tmp_path / "run/checkpoints")
    assert main(["checkpoint", "import", str(tmp_path / "theirs"), str(recipe), target, "--from", "huggingface"]) == 0
    ours = logits(tmp_path / "run/checkpoints/step-00000000", GPT2)[..., :40]
    with torch.no_grad():
        assert torch.allclose(ours, theirs(TOKENS).logits, atol=1e-5)


def torchtitan_name(name: str) -> str:
    module = name.removeprefix("layers.0.").removeprefix("layers.1.").rsplit(".", 1)[0]
    return name.replace(module, TORCHTITAN.get(module, module))


def neighbours(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The rows in torchtitan's order: the halves of each head interleaved."""
    if not name.endswith(("query.weight", "key.weight")):
        return tensor
    return (
        tensor.reshape(-1, 2, LLAMA.head_dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape).contiguous()
    )


def save_as_torchtitan(model: GPT, folder: Path, prefix: str = "") -> None:
    """Save a model with moments that are computed from its weights, at step 9."""
    state: dict[str, object] = {"train_state": {"step": torch.tensor(9)}, "lr_scheduler.last_epoch": 9}
    for name, parameter in model.named_parameters():
        theirs, value = torchtitan_name(name), neighbours(name, parameter.detach())
        state[prefix + theirs] = value
        state[f"optimizer.state.{theirs}.exp_avg"] = 2 * value
        state[f"optimizer.state.{theirs}.exp_avg_sq"] = value**2
        state[f"optimizer.state.{theirs}.step"] = torch.tensor(9.0)
        state[f"optimizer.param_groups.{theirs}.lr"] = 0.1
    dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("recipe", [LLAMA], indirect=True)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_dcp_folder_of_torchtitan_is_imported_with_its_moments(recipe: Path, tmp_path: Path, prefix: str) -> None:
    model = GPT(LLAMA)
    save_as_torchtitan(model, tmp_path / "theirs", prefix)
    target = str(tmp_path / "run/checkpoints")
    arguments = ["checkpoint", "import", str(tmp_path / "theirs"), str(recipe), target, "--from", "dcp"]
    assert main(arguments) == 0
    reader = Reader(tmp_path / "run/checkpoints/step-00000009")
    for name, parameter in model.named_parameters():
        assert np.array_equal(reader[f"model.{name}"], parameter.detach().numpy()), name
        assert np.array_equal(reader[f"optim.{name}.exp_avg"], 2 * parameter.detach().numpy()), name
        assert reader[f"optim.{name}.step"] == 9


@pytest.mark.parametrize("recipe", [LLAMA], indirect=True)
def test_under_a_muon_recipe_matrices_have_muon_s_state_and_the_others_their_moments(
    recipe: Path, tmp_path: Path
) -> None:
    muon = load_recipe(recipe, ["optim.algorithm=muon"])
    recipe.write_text(recipe_as_yaml(muon))
    save_as_torchtitan(GPT(LLAMA), tmp_path / "theirs")
    target = tmp_path / "run/checkpoints"
    arguments = ["checkpoint", "import", str(tmp_path / "theirs"), str(recipe), str(target), "--from", "dcp", "--trust"]
    assert main(arguments) == 0
    reader = Reader(target / "step-00000009")
    assert "optim.layers.0.mlp.up.weight.exp_avg_sq" not in reader.names()
    assert not np.any(reader["optim.layers.0.mlp.up.weight.exp_avg"]), "AdamW's moment is not Muon's momentum"
    assert np.array_equal(reader["optim.embed.weight.exp_avg"], 2 * reader["model.embed.weight"])

    model = GPT(LLAMA)
    optimizer = build_optimizer(model, muon.optim)
    optimizer.create_state()
    state: dict[str, CheckpointTensor] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        state |= {f"optim.{name}.{kind}": tensor for kind, tensor in optimizer.state[parameter].items()}
    manager = CheckpointManager(target, CheckpointConfig(), {"model": identity_of(muon)}, lambda *_, **__: None)
    assert manager.load_newest(state) is not None
    manager.close()
    assert {float(reader[name]) for name in reader.names() if name.endswith(".step")} == {9.0}


def test_without_trust_nothing_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pickled = [name for name, kind in KINDS.items() if kind.unpickles]
    assert set(pickled) == {"deepspeed", "universal"}
    for kind in pickled:
        assert main(["checkpoint", "import", str(tmp_path), "recipe.yaml", str(tmp_path), "--from", kind]) == 2
        assert "add --trust if you know where it comes from" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", [GPT2], indirect=True)
def test_a_source_of_another_model_is_refused_by_name(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_inner=64, n_layer=1, n_head=4, n_positions=16))
    theirs.save_pretrained(tmp_path / "theirs")
    config = tmp_path / "theirs/config.json"
    config.write_text(config.read_text().replace('"n_layer": 1', '"n_layer": 2'))
    arguments = ["checkpoint", "import", str(tmp_path / "theirs"), str(recipe), str(tmp_path / "c")]
    assert main([*arguments, "--from", "huggingface"]) == 2
    assert "16 missing (layers.1.attention.key.bias" in capsys.readouterr().err


DEEPSPEED = """
import os, sys, warnings, torch, deepspeed
warnings.simplefilter("ignore")
from train.model.config import ModelConfig
from train.model.gpt import GPT
from train.optim.groups import build_optimizer
deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed("gloo", verbose=False, auto_mpi_discovery=False)
folder, stage, sizes = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
model = GPT(ModelConfig(**sizes))
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), dist_init_required=False,
    config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True},
)
tokens = torch.arange(16)[None]
loss = engine(tokens, tokens, torch.zeros_like(tokens), tokens).sum()
engine.backward(loss)
engine.step()
engine.save_checkpoint(folder, tag="last")
params = engine.module.named_parameters()
torch.save({n: deepspeed.utils.safe_get_full_fp32_param(p) for n, p in params}, folder + "/expected.pt")
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
sys.argv = ["x", "--input_folder", folder + "/last", "--output_folder", folder + "/universal"]
sys.argv += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
main(parse_arguments())
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [LLAMA], indirect=True)
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_folders_are_imported_with_their_weights(recipe: Path, tmp_path: Path, stage: int) -> None:
    sizes = LLAMA.model_dump()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4]), "OMP_NUM_THREADS": "1"}
    environment |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}  # DeepSpeed reads these
    source = tmp_path / "theirs"
    arguments = [sys.executable, "-c", DEEPSPEED, str(source), str(stage), repr(sizes)]
    run = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600)
    assert (source / "universal" / "zero").is_dir(), run.stdout[-3000:] + run.stderr[-5000:]
    tokens_per_step = load_recipe(recipe).train.global_batch_size * LLAMA.seq_len
    expected = torch.load(source / "expected.pt", weights_only=True)
    for kind, folder in (("deepspeed", source), ("universal", source / "universal")):
        target = str(tmp_path / kind / "checkpoints")
        assert main(["checkpoint", "import", str(folder), str(recipe), target, "--from", kind, "--trust"]) == 0
        (imported,) = Path(target).glob("step-*")
        reader = Reader(imported)
        for name, value in expected.items():
            assert np.array_equal(reader[f"model.{name}"], value.numpy()), name
        if kind == "universal":
            assert all(np.any(reader[f"optim.{name}.exp_avg"]) for name in expected)
        state: dict[str, CheckpointTensor] = {
            name: torch.empty(reader[name].shape) for name in reader.names() if not name.endswith(".step")
        } | {name: torch.tensor(0.0) for name in reader.names() if name.endswith(".step")}
        manager = CheckpointManager(target, CheckpointConfig(), {"model": identity_of(load_recipe(recipe))}, print)
        loaded = manager.load_newest(state)
        manager.close()
        assert loaded is not None
        assert loaded.progress.step == (1 if kind == "universal" else 0)
        assert Progress.of(loaded.progress).tokens == loaded.progress.step * tokens_per_step
