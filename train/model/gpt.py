"""The GPT, in GPT-2 style or Llama style by its settings.

Shapes: B micro batch, T sequence, D d_model, V vocabulary, M metrics, L layers.
"""

import hashlib
from typing import ClassVar

import torch
from torch import Tensor, nn

from parallel.engines.normal import standard_normal
from parallel.sharded import whole_of
from train.model.attention import AttentionChoice, find_boundaries
from train.model.block import Block
from train.model.cache import Cache
from train.model.config import ModelConfig
from train.model.feed_forward import feed_forward_class
from train.model.kernels.linear import Linear
from train.model.loss import LossByRow, linear_cross_entropy_by_row
from train.model.mlp import Auxiliary
from train.model.mup import output_multiplier
from train.model.norm import build_norm, declare_norm
from train.model.parameters import Parameter, under
from train.model.rope import rope_rotation


class GPT(nn.Module):
    """Decoder-only transformer. Its parameters are embed, positions, layers.N.{attention,mlp}..., norm and head."""

    tensor_plan: ClassVar[dict[str, str]] = {
        "embed": "lookup",
        "positions": "lookup",
        "norm": "sequence",
        "head": "vocabulary",
    }
    llama: ClassVar[dict[str, str]] = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    gpt2: ClassVar[dict[str, str]] = {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }

    def __init__(self, config: ModelConfig, attention: AttentionChoice | None = None) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.seq_len, config.d_model) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = build_norm(config)
        self.output_multiplier = output_multiplier(config)
        self.head = Head(config.d_model, config.vocab_size, bias=False)
        self.loss_by_row: LossByRow | None = None
        """Loss of logits. Tensor parallelism, which splits the vocabulary, sets its own here."""
        self.tie()

    @staticmethod
    def declare(config: ModelConfig) -> dict[str, Parameter]:
        """The parameters outside of blocks. A tied head has no parameter of its own."""
        table, std, tied = (config.vocab_size, config.d_model), config.init_std, config.tied_embeddings
        parameters = {"embed.weight": Parameter(table, "table", std, multiplied=1.0 if tied else 0.0)}
        if config.positions == "learned":
            positions = Parameter((config.seq_len, config.d_model), "table", std, multiplied=0.0)
            parameters["positions.weight"] = positions
        parameters |= under("norm", declare_norm(config))
        return parameters if tied else {**parameters, "head.weight": Parameter(table, "table", std)}

    def tie(self) -> None:
        """Make the head use the embedding's matrix again, after anything that replaced parameters."""
        if self.config.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor,
        labels_BT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor | tuple[Tensor, Auxiliary]:
        """Logits_BTV; or, given labels, the summed loss of each sequence in nats, shape (B,), fp32.

        With a cache, the tokens follow those that it has, at their positions, and each row is one document.

        If blocks report auxiliary losses or metrics, their sums over blocks come with the loss as `Auxiliary`."""
        x_BTD = self.embed(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT)
        x_BTD = self.dropout(x_BTD)
        if cache is None:
            boundaries_L = [find_boundaries(documents_BT, self.attention)] * len(self.layers)
        else:
            boundaries_L = cache.at(positions_BT)
        rotation = rope_rotation(positions_BT, self.config) if self.config.positions == "rope" else None
        auxiliary: Auxiliary | None = None
        for layer, boundaries in zip(self.layers.values(), boundaries_L, strict=True):
            output = layer(x_BTD, boundaries, rotation)
            if isinstance(output, Tensor):
                x_BTD = output
            else:
                x_BTD, reported = output
                auxiliary = _sum(auxiliary, reported)
        x_BTD = self.norm(x_BTD)
        if self.output_multiplier != 1.0:
            x_BTD = x_BTD * self.output_multiplier
        if labels_BT is None:
            return self.head(x_BTD)
        if self.loss_by_row is not None:
            loss_B = self.loss_by_row(self.head(x_BTD), labels_BT)
        else:
            loss_B = self.head(x_BTD, labels_BT)
        return loss_B if auxiliary is None else (loss_B, auxiliary)


def _sum(total: Auxiliary | None, reported: Auxiliary) -> Auxiliary:
    """What the blocks reported so far, as plain tensors. Collective under tensor parallelism."""
    loss, metrics_M = whole_of(reported.loss), whole_of(reported.metrics_M)
    return Auxiliary(loss, metrics_M) if total is None else Auxiliary(total.loss + loss, total.metrics_M + metrics_M)


class Head(Linear):
    """The output projection. It computes the fused loss too: engines gather weights around a module's forward."""

    compiled: bool = False
    """Whether the loss is compiled."""

    def forward(self, input: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        """Logits_BTV; or, given labels, the summed loss of each sequence in nats, shape (B,), fp32."""
        if labels_BT is None:
            return super().forward(input)
        return linear_cross_entropy_by_row(input, self.weight, labels_BT, compiled=self.compiled)


def metric_names(config: ModelConfig) -> tuple[str, ...]:
    """Names of the M metrics that the model reports with its loss; empty if it reports none."""
    return feed_forward_class(config).metric_names(config)


def parameter_of(name: str, config: ModelConfig) -> Parameter:
    """The declaration of a parameter by its plain name. KeyError if the model has no such parameter."""
    if name.startswith("layers."):
        return Block.declare(config)[name.split(".", 2)[2]]
    return GPT.declare(config)[name]


def initial_value(name: str, pairs: Tensor, config: ModelConfig, seed: int) -> Tensor:
    """The fp32 initial values of a parameter, by its plain name (`parallel.engine.InitialValue`).

    Each is a function of seed, name and the element's number, so it has the same bits in any layout. With logits near
    zero at the start, the first loss is near ln V."""
    parameter = parameter_of(name, config)
    mean = 1.0 if parameter.kind == "gain" else 0.0
    if not parameter.std:
        return torch.full((*pairs.shape[:-1], 2 * pairs.shape[-1]), mean, device=pairs.device)
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big")
    values = standard_normal(key, pairs).mul_(parameter.std)
    return values.add_(mean) if mean else values
