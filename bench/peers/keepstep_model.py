"""The benchmark's model as settings of Keepstep, for the contenders that need them."""

from protocol import Spec

from train.model.config import ModelConfig


def model_config(spec: Spec) -> ModelConfig:
    """Keepstep's settings of the model."""
    return ModelConfig(
        vocab_size=spec.vocab_size,
        seq_len=spec.seq_len,
        n_layers=spec.n_layers,
        n_heads=spec.n_heads,
        d_model=spec.d_model,
        d_ff=spec.d_ff,
    )
