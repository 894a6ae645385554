"""Opens a model of Hugging Face's folder through the importer, without a checkpoint in between."""

from pathlib import Path

import tokenizers
import torch
from pydantic import ValidationError

from data_pipeline.tokenizers.tokenizer import HUGGING_FACE_FILE, Tokenizer, load_tokenizer
from data_pipeline.untrusted import read_file
from train.checkpoint.importing.config_json import CONFIG, Stated
from train.checkpoint.importing.convert import weights_of
from train.checkpoint.importing.importers import read_source
from train.checkpoint.importing.names import layout_of
from train.errors import CheckpointError
from train.model.config import ModelConfig
from train.model.gpt import GPT

DEFAULT_SEQ_LEN = 2048
"""Length of the context of a model that states none."""


def open_hugging_face(folder: Path) -> tuple[GPT, Tokenizer]:
    """The model and the tokenizer of a folder. CheckpointError or DataError if our model does not compute it."""
    source = read_source("huggingface", folder)
    assert source.stated is not None, "the reader refuses a folder that states no model"
    config = _model_config(source.stated, folder)
    if config.n_layers > len(source.weights):  # before so many layers are built
        raise CheckpointError(f"{folder} states {config.n_layers} layers, more than it has tensors")
    with torch.device("meta"):
        model = GPT(config)
    parameters = dict(model.named_parameters())
    weights = weights_of(source, layout_of(source.weights, config), config, parameters, str(folder))
    model.load_state_dict(weights, strict=False, assign=True)  # a tied head is stored once, so it is missing here
    model.tie()
    tokenizer = load_tokenizer(folder, beginning_of_document=_first_token(folder / HUGGING_FACE_FILE))
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} tokens, more than the model's vocabulary "
            f"({config.vocab_size}); it is not the tokenizer of this model"
        )
    return model.eval(), tokenizer


def _model_config(stated: Stated, folder: Path) -> ModelConfig:
    limits = [limit for limit in (stated.trained_seq_len, stated.max_seq_len) if limit is not None]
    length = {"seq_len": min(limits, default=DEFAULT_SEQ_LEN)}
    try:
        return ModelConfig.model_validate(length | stated.settings)
    except ValidationError as error:
        problem = error.errors()[0]
        raise CheckpointError(
            f"{folder / CONFIG}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}; save the model again"
        ) from None


def _first_token(file: Path) -> str | None:
    """The token that a tokenizer.json puts before each text, or None."""
    if not file.is_file():
        return None
    fast = tokenizers.Tokenizer.from_str(read_file(file).decode())
    bare, whole = (fast.encode("a", add_special_tokens=special).ids for special in (False, True))
    return fast.id_to_token(whole[0]) if whole[:1] != bare[:1] else None
