"""Writes a trained model as a Hugging Face folder, and checks that the folder computes the same."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from data_pipeline.stream.stream import open_stream
from train.errors import ConfigError
from train.export.hugging_face import write_model
from train.export.tokenizer import equal_encodings, write_tokenizer
from train.export.trained_model import Trained


@dataclass(frozen=True)
class Check:
    """What a reloaded folder gave."""

    largest_difference: float
    """Between the logits of both models, over validation text."""
    largest_logit: float
    equal_texts: int
    texts: int


def export(trained: Trained, out: Path) -> None:
    """Make `out`, whole or not at all. ConfigError if it exists or if no architecture fits."""
    if out.exists():
        raise ConfigError(f"--out ({out}) exists; name a new folder")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    transformers_logging.disable_progress_bar()
    tokenizer, config = trained.tokenizer, trained.recipe.model
    weights = dict(trained.model.named_parameters())
    try:
        partial.mkdir(parents=True)
        write_model(weights, config, tokenizer.vocab_size, tokenizer.end_of_document, partial)
        write_tokenizer(trained.tokenizer_dir, tokenizer.end_of_document, config.seq_len, partial)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@torch.inference_mode()
def check(trained: Trained, out: Path) -> Check:
    """Reload with transformers and compare logits and token ids on validation text."""
    recipe, size = trained.recipe, trained.tokenizer.vocab_size
    theirs = AutoModelForCausalLM.from_pretrained(out)
    with open_stream(recipe.data, seq_len=recipe.model.seq_len) as stream:
        batch = next(iter(stream.validation(sequences=4, micro_batch_size=4, rank=0, world_size=1)))
    tokens_BT = torch.from_numpy(batch.tokens_BT)
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    ours_BTV = trained.model(tokens_BT, positions_BT, torch.zeros_like(tokens_BT))[..., :size]
    difference = (ours_BTV - theirs(tokens_BT).logits).abs().max().item()
    texts = [trained.tokenizer.decode(row) for row in tokens_BT.tolist()]
    equal = equal_encodings(trained.tokenizer, out, texts)
    return Check(difference, ours_BTV.abs().max().item(), equal, len(texts))
