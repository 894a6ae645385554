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
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of the matrix products. Weights, moments and gradient reductions stay in fp32."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute blocks in the backward pass: none, full, or selective (keep matrix products and attention)."""
    checkpoint_every_k_blocks: int = Field(default=1, ge=1)
    """Recompute only every k-th block."""
    reshard_after_forward: bool = True
    """fsdp2: free gathered weights between forward and backward; less memory, one gather more."""
    reduce_every_micro_batch: bool = True
    """fsdp2: reduce-scatter gradients after each micro batch; false: once a step, and each rank holds whole ones."""
    cpu_offload: bool = False
    """zero1 to zero3: optimizer state in host memory."""
    compile: bool = False
    """torch.compile each block."""
    device: str = "auto"
    """auto, cpu, cuda, or another accelerator that torch knows."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """How long a collective may take before the run is given up."""

    @model_validator(mode="after")
    def _combinations(self) -> "ParallelConfig":
        if self.shard == 0:
            raise ValueError("shard (0) must be at least 1; set it to -1 to use the remaining ranks")
        return self
