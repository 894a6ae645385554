"""An import brings the tokenizer that lies beside the weights, and refuses weights that it cannot read, by name."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from data_pipeline.build.prepare import BuildOptions, build_dataset
from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from launch.cli import main
from tests.train.checkpoint.importing.test_training import (  # noqa: F401 - fixtures
    LlamaFolder,
    data,
    import_it,
    llama,
    recipe,
    train,
)
from train.checkpoint.format.reader import Reader
from train.config_file import load_recipe, recipe_as_yaml
from train.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_the_tokenizer_beside_the_weights_comes_along(
    data: Path,  # noqa: F811
    recipe: Path,  # noqa: F811
    tmp_path: Path,
    llama: LlamaFolder,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = llama()
    shutil.copy(data / "tokenizer/tokenizer.model", source)
    assert import_it(source, recipe, tmp_path / "run", "huggingface") == 0
    shutil.rmtree(source)
    attached = Reader(tmp_path / "run/checkpoints/step-00000000").manifest["attachments"]
    assert "tokenizer/tokenizer.model" in [each["name"] for each in attached]
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "run"), "--prompt", "import", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("import")
    assert main(["eval", str(tmp_path / "run"), "--data", str(data)]) == 0
    assert len(train(load_recipe(recipe, ["train.steps=3"]))) == 3
    assert import_it(tmp_path / "run", recipe, tmp_path / "again", "keepstep") == 0
    assert main(["generate", str(tmp_path / "again"), "--prompt", "import", "--tokens", "3"]) == 0


def test_data_with_another_tokenizer_are_refused(
    data: Path,  # noqa: F811
    recipe: Path,  # noqa: F811
    tmp_path: Path,
    llama: LlamaFolder,  # noqa: F811
) -> None:
    source = llama()
    shutil.copy(data / "tokenizer/tokenizer.model", source)
    assert import_it(source, recipe, tmp_path / "run", "huggingface") == 0
    texts = [path.read_text() for path in sorted(Path(__file__).parents[4].glob("launch/*.py"))]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_sentencepiece(texts, tmp_path / "tokenizer", vocab_size=500)
    build_dataset([str(tmp_path / "texts.jsonl")], tmp_path / "set", tmp_path / "tokenizer", BuildOptions(seq_len=32))
    with pytest.raises(CheckpointError, match="the data were built with another tokenizer than that of"):
        train(load_recipe(recipe, [f"data.sources.0.path={tmp_path / 'set'}"]))


def test_a_tokenizer_larger_than_the_vocabulary_stays_behind_and_a_note_says_so(
    data: Path,  # noqa: F811
    recipe: Path,  # noqa: F811
    tmp_path: Path,
    llama: LlamaFolder,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = llama(vocab_size=500)
    shutil.copy(data / "tokenizer/tokenizer.model", source)
    recipe.write_text(recipe_as_yaml(load_recipe(recipe, ["model.vocab_size=500"])))
    assert import_it(source, recipe, tmp_path / "run", "huggingface") == 0
    assert "it has 512 tokens, more than the model's vocabulary (500)" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "run"), "--prompt", "import"]) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    value: float,
    recipe: Path,  # noqa: F811
    tmp_path: Path,
    llama: LlamaFolder,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = llama()
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert import_it(source, recipe, tmp_path / "run", "huggingface") == 2
    assert "norm.weight has values in" in (said := capsys.readouterr().err)
    assert "that are not finite; import an earlier checkpoint" in said
    assert not list(tmp_path.glob("run/checkpoints/*"))
    assert not (tmp_path / "run/recipe.yaml").exists()


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ],
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantized_checkpoints_are_refused_by_name(
    quantization: dict,
    key: str,
    recipe: Path,  # noqa: F811
    tmp_path: Path,
    llama: LlamaFolder,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = llama()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {key: quantization}))
    capsys.readouterr()
    assert import_it(source, recipe, tmp_path / "run", "huggingface") == 2
    err = capsys.readouterr().err
    assert f"{key} {{'quant_method': '{quantization['quant_method']}'" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
