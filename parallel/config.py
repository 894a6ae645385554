"""Where tensors live: the engine, the mesh and the precision."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

EngineName = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]


class ParallelConfig(BaseModel):
    """How the model is spread over ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    engine: EngineName = "fsdp2"
    """What wraps the model: single, ddp, fsdp2, or DeepSpeed's zero1, zero2, zero3."""
    replicate: int = Field(default=1, ge=1)
    """fsdp2: replicas of the sharded model (HSDP when above 1)."""
    shard: int = Field(default=-1, ge=-1)
    """fsdp2: ranks that share one copy of the model; -1 takes the ranks that are left."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that split each matrix (tensor parallelism)."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "bf16"
    """Of the matrix products; fp8: of those inside blocks, on Hopper and newer, the rest in bf16. Weights, moments and
    gradient reductions stay in fp32."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute blocks in the backward pass: none, full, or selective (keep matrix products and attention)."""
    checkpoint_every_k_blocks: int = Field(default=1, ge=1)
    """Recompute only every k-th block."""
    reshard_after_forward: bool = True
    """fsdp2 and zero3: free gathered weights between forward and backward; less memory, one gather more."""
    reduce_every_micro_batch: bool = True
    """fsdp2: reduce-scatter gradients after each micro batch; false: once a step, and each rank holds whole ones."""
    cpu_offload: bool = False
    """zero1 to zero3: optimizer state in host memory."""
    compile: bool = False
    """torch.compile each block."""
    activation_memory_budget: float = Field(default=1.0, ge=0, le=1)
    """compile: the share of a block's activations to keep; the compiler picks what is cheapest to compute again."""
    device: str = "auto"
    """auto, cpu, cuda, or another accelerator that torch knows."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """How long a collective may take before the run is given up."""

    @model_validator(mode="after")
    def _combinations(self) -> "ParallelConfig":
        if self.shard == 0:
            raise ValueError("shard (0) must be at least 1; set it to -1 to use the remaining ranks")
        if self.engine != "fsdp2":
            self._only_with("fsdp2", "replicate", 1, "the other engines replicate or cut over all ranks")
            self._only_with("fsdp2", "shard", -1, "the other engines replicate or cut over all ranks")
            self._only_with("fsdp2", "reduce_every_micro_batch", True, "the other engines have one way only")
        if self.engine not in ("fsdp2", "ddp"):
            self._only_with("fsdp2 or ddp", "tensor", 1, "DeepSpeed and a single process do not split matrices")
        if self.engine not in ("fsdp2", "zero3"):
            self._only_with("fsdp2 or zero3", "reshard_after_forward", True, "the others gather no weights")
        if not self.engine.startswith("zero"):
            self._only_with("zero1, zero2 or zero3", "cpu_offload", False, "the others keep all state on the device")
        if self.compile and self.tensor != 1:
            raise ValueError(
                f"compile (true) with tensor ({self.tensor}): torch 2.13 compiles split blocks into "
                "other gradients; set compile to false, or tensor to 1"
            )
        if self.activation_checkpointing == "none" and self.checkpoint_every_k_blocks != 1:
            raise ValueError(
                f"checkpoint_every_k_blocks ({self.checkpoint_every_k_blocks}) has no effect while "
                "activation_checkpointing is none; set that to full or selective, or leave this at 1"
            )
        return self

    @model_validator(mode="after")
    def _fp8(self) -> "ParallelConfig":
        if self.precision == "fp8" and self.engine.startswith("zero"):
            self._only_with("single, ddp or fsdp2", "precision", "bf16", "torchao's layers are not made for DeepSpeed")
        if self.precision == "fp8" and self.tensor != 1:
            raise ValueError(
                f"precision (fp8) with tensor ({self.tensor}): layers in fp8 are not split here; "
                "set precision to bf16, or tensor to 1"
            )
        return self

    @model_validator(mode="after")
    def _budget(self) -> "ParallelConfig":
        budget = self.activation_memory_budget
        if budget != 1 and not (self.compile and self.activation_checkpointing == "none"):
            raise ValueError(
                f"activation_memory_budget ({budget:g}) is kept by the compiler, in place of activation_checkpointing; "
                "set compile to true and activation_checkpointing to none, or leave the budget at 1"
            )
        return self

    def _only_with(self, engines: str, name: str, neutral: object, reason: str) -> None:
        if getattr(self, name) != neutral:
            raise ValueError(
                f"{name} ({_yaml(getattr(self, name))}) is for engine {engines}, not {self.engine}: {reason}; "
                f"set engine to {engines} or {name} to {_yaml(neutral)}"
            )

    def check_model(
        self, *, seq_len: int, n_heads: int, n_kv_heads: int, d_model: int, d_ff: int, vocab_size: int
    ) -> None:
        """Raises ValueError if tensor parallelism cannot split this model evenly, or fp8 not multiply its matrices."""
        sizes = {"seq_len": seq_len, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_ff": d_ff}
        for name, size in {**sizes, "vocab_size": vocab_size}.items():
            if size % self.tensor:
                smaller = max(n for n in range(1, self.tensor) if size % n == 0)
                raise ValueError(
                    f"model.{name} ({size}) must be a multiple of parallel.tensor ({self.tensor}), which splits it; "
                    f"set parallel.tensor to {smaller}, or change model.{name}"
                )
        if self.precision != "fp8":
            return
        sides = {"seq_len": seq_len, "d_model": d_model, "d_ff": d_ff}
        for name, size in {**sides, "n_kv_heads x d_model / n_heads": n_kv_heads * d_model // n_heads}.items():
            if size % 16:
                raise ValueError(
                    f"model.{name} ({size}) must be a multiple of 16 for matrix products in fp8; "
                    "change it, or set parallel.precision to bf16"
                )


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
