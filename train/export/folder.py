"""Writes a trained model as a Hugging Face folder, and checks that the folder computes the same."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from train.errors import ConfigError
from train.export.hard_texts import HARD_TEXTS
from train.export.hugging_face import write_model
from train.export.tokenizer import check_encodings, write_tokenizer
from train.export.trained_model import Trained

_SEQUENCES = 4


@dataclass(frozen=True)
class Check:
    """How an exported model, reloaded by transformers, compares with the trained model."""

    largest_difference: float
    """Largest difference between the logits of the two models."""
    largest_logit: float
    """Largest absolute logit of the trained model."""


def export(trained: Trained, out: Path) -> int:
    """Write the model and its tokenizer to the new folder `out`, which appears only when it is complete.

    Returns the number of texts to which the exported tokenizer gives the same ids as training's. ConfigError if `out`
    exists, if no Hugging Face architecture fits the model, or if ids differ."""
    if out.exists():
        raise ConfigError(f"--out ({out}) exists; name a new folder")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    transformers_logging.disable_progress_bar()
    tokenizer, config = trained.tokenizer, trained.model.config
    weights = dict(trained.model.named_parameters())
    try:
        partial.mkdir(parents=True)
        begin, end = tokenizer.beginning_of_document, tokenizer.end_of_document
        write_model(weights, config, tokenizer.vocab_size, end, partial, begin)
        write_tokenizer(trained.tokenizer_dir, end, config.seq_len, partial, begin)
        equal_texts = check_encodings(tokenizer, partial)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return equal_texts


@torch.inference_mode()
def check(trained: Trained, out: Path) -> Check:
    """Reload the exported folder with transformers and compare logits on a fixed text."""
    theirs = AutoModelForCausalLM.from_pretrained(out)
    tokens_BT = _tokens(trained)
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    ours_BTV = trained.model(tokens_BT, positions_BT, torch.zeros_like(tokens_BT))[..., : trained.tokenizer.vocab_size]
    difference = (ours_BTV - theirs(tokens_BT).logits).abs().max().item()
    return Check(difference, ours_BTV.abs().max().item())


def _tokens(trained: Trained) -> torch.Tensor:
    """Full sequences of the hard texts' tokens, repeated as often as needed."""
    tokenizer, length = trained.tokenizer, trained.model.config.seq_len
    ids = [token for text in HARD_TEXTS for token in (*tokenizer.encode(text), tokenizer.end_of_document)]
    needed = _SEQUENCES * length
    return torch.tensor((ids * -(-needed // len(ids)))[:needed]).view(_SEQUENCES, length)
