"""What a plan is made for: a model's sizes, and how its ranks are arranged. Plain values, without torch."""

from dataclasses import dataclass
from typing import Literal

Engine = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
"""As `parallel.engine`. `zero1` stands for any distributed optimizer."""
Recomputation = Literal["none", "selective", "attention", "full"]
"""What the backward pass computes again: nothing; what lies between matrix products; attention's scores
(Korthikanti et al. 2022, section 5); or whole blocks."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer of most blocks."""

    number: int
    per_token: int
    d_ff: int
    """Width of one expert."""
    shared: int = 0
    """Experts that every token visits."""
    dense_layers: int = 0
    """Blocks that keep the dense feed-forward layer."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a transformer, as far as memory and time depend on them."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    seq_len: int
    gated: bool = True
    """Whether the feed-forward layer has three matrices (SwiGLU) instead of two."""
    tied: bool = False
    learned_positions: bool = False
    experts: Experts | None = None

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of one block's attention: query, key, value, output."""
        return 2 * self.d_model * self.head_dim * (self.n_heads + self.n_kv_heads)

    @property
    def dense_layers(self) -> int:
        """Blocks with a dense feed-forward layer."""
        return self.n_layers if self.experts is None else self.experts.dense_layers

    @property
    def dense_feed_forward(self) -> int:
        """Parameters of a dense feed-forward layer."""
        return self.matrices * self.d_model * self.d_ff

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 without experts."""
        return self.matrices * self.d_model * self.experts.d_ff if self.experts else 0

    @property
    def block_parameters(self) -> int:
        """Parameters of all blocks, without their experts that are not shared."""
        parameters = self.n_layers * (self.attention_parameters + 2 * self.d_model)
        parameters += self.dense_layers * self.dense_feed_forward
        if self.experts is not None:
            router = self.d_model * self.experts.number
            parameters += self.expert_layers * (router + self.experts.shared * self.expert_parameters)
        return parameters

    @property
    def expert_layers(self) -> int:
        """Blocks with experts."""
        return self.n_layers - self.dense_layers

    @property
    def all_experts(self) -> int:
        """Parameters of all experts that are not shared."""
        return self.expert_layers * self.experts.number * self.expert_parameters if self.experts else 0

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of the head if it is not tied."""
        return self.vocab_size * self.d_model

    @property
    def outer_parameters(self) -> int:
        """Parameters outside of blocks."""
        positions = self.seq_len * self.d_model if self.learned_positions else 0
        return self.table * (1 if self.tied else 2) + positions + self.d_model

    @property
    def parameters(self) -> int:
        """All parameters; tied ones count once."""
        return self.block_parameters + self.all_experts + self.outer_parameters

    @property
    def multiplied_per_token(self) -> int:
        """Parameters of the matrices that one token is multiplied by, in all blocks and the head."""
        chosen = self.experts.per_token * self.expert_parameters * self.expert_layers if self.experts else 0
        return self.block_parameters - 2 * self.d_model * self.n_layers + chosen + self.table

    @property
    def attention_flops_per_token(self) -> int:
        """Forward FLOP of scores and weighted values for one token, all blocks, with the causal half left out."""
        return 2 * self.n_layers * self.n_heads * self.head_dim * self.seq_len

    @property
    def flops_per_token(self) -> int:
        """FLOP of one token forward and backward, without recomputation and with causal attention."""
        return 6 * self.multiplied_per_token + 3 * self.attention_flops_per_token


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Number of ranks along each axis, and what a step is made of."""

    data: int
    """Data-parallel ranks (replicate x shard)."""
    shard: int = 1
    """Ranks of `data` that share one replica."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Ranks over which the experts of a block are dealt."""
    virtual_stages: int = 1
    """Stages of a rank, interleaved."""
    engine: Engine = "fsdp2"
    micro_batch_size: int = 1
    """Sequences of a forward pass."""
    micro_batches: int = 1
    """Forward passes of a step per data-parallel rank."""
    precision: str = "bf16"
    recomputation: Recomputation = "none"
    recompute_every: int = 1
    """Distance between recomputed blocks."""
    offload: bool = False
    """Whether masters, gradients and optimizer state lie in host memory."""
    reduce_every_micro_batch: bool = True
    reshard_after_forward: bool = True
    gradient_bytes: int = 4
    """Bytes of a gradient when it is kept and reduced."""

    @property
    def gpus(self) -> int:
        """Number of all ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step."""
        return self.data * self.micro_batch_size * self.micro_batches

    @property
    def shards_weights(self) -> bool:
        """Whether ranks hold slices of the weights and gather them for each pass."""
        return self.engine in ("fsdp2", "zero3")

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that share one copy of the optimizer's state."""
        if self.engine in ("single", "ddp"):
            return 1
        return (self.shard if self.engine == "fsdp2" else self.data) * self.context

    @property
    def working_bytes(self) -> int:
        """Bytes of a weight as the matrix products see it, and of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def recomputed_share(self) -> float:
        """Share of the blocks that are recomputed."""
        return 0.0 if self.recomputation == "none" else 1 / self.recompute_every

    def tokens_of_rank(self, model: ModelShape) -> float:
        """Tokens of a micro batch that one rank of a context group holds."""
        return self.micro_batch_size * model.seq_len / self.context
