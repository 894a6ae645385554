"""Compares an imported model with transformers. B sequences, T tokens, V vocabulary."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from train.errors import CheckpointError
from train.model.config import ModelConfig
from train.model.gpt import GPT

TOLERANCE = 1e-4
"""Largest difference of logits that is accepted, relative to the largest logit. Rounding in fp32 gives about 1e-6."""
SEQUENCES, LONGEST = 2, 512


def check_logits(folder: Path, state: Mapping[str, Tensor], config: ModelConfig) -> float:
    """The relative difference of logits between the model in a Hugging Face folder and ours, both in fp32 on the CPU.

    Random tokens from a fixed seed. CheckpointError above TOLERANCE."""
    disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocab_size = int(theirs.config.vocab_size)
    seq_len = min(config.seq_len, LONGEST, getattr(theirs.config, "max_position_embeddings", LONGEST))
    tokens_BT = torch.randint(vocab_size, (SEQUENCES, seq_len), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs_BTV = theirs(tokens_BT).logits
        ours_BTV = _model(state, config)(tokens_BT, torch.arange(seq_len).expand_as(tokens_BT), 0 * tokens_BT)
    difference = (ours_BTV[..., :vocab_size] - theirs_BTV).abs().max() / theirs_BTV.abs().max()
    if not float(difference) <= TOLERANCE:  # a NaN is refused too
        raise CheckpointError(
            f"the imported model does not compute what transformers computes from {folder}: logits differ by "
            f"{float(difference):.3g} of the largest, more than {TOLERANCE:g}; nothing was saved: a field of "
            "config.json or a weight has a meaning that the import does not know"
        )
    return float(difference)


def _model(state: Mapping[str, Tensor], config: ModelConfig) -> GPT:
    """Our model with the weights of the state, in evaluation mode."""
    with torch.device("meta"):
        model = GPT(config)
    weights = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie()
    return model.eval()
