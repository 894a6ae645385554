"""The section `parallel` of a recipe: the engine, the layout of ranks and the precision."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

EngineName = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]


class ParallelConfig(BaseModel):
    """How the model is spread over ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    engine: EngineName = "fsdp2"
    """Engine that trains the model: single (one process), ddp, fsdp2, or DeepSpeed's zero1, zero2, zero3."""
    replicate: int = Field(default=1, ge=1)
    """Number of replicas of the sharded model, for fsdp2; HSDP when above 1."""
    shard: int = Field(default=-1, ge=-1)
    """Number of ranks that share one replica of the model, for fsdp2; -1 stands for the remaining ranks."""
    tensor: int = Field(default=1, ge=1)
    """Number of ranks that split each matrix (tensor parallelism)."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "bf16"
    """Precision of the matrix products. fp8 applies to those inside blocks, on Hopper and newer; the rest is bf16.
    Weights, optimizer state and gradient reductions stay in fp32."""
    fp8_scaling: Literal["rowwise", "tensorwise"] = "rowwise"
    """Scales of fp8: rowwise has one for each row or column that a product adds up. tensorwise has one for each tensor:
    less exact, but products are faster, and fsdp2 gathers the weights of blocks in fp8."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recomputation of blocks in the backward pass: none, full, or selective, which keeps the results of matrix
    products and attention."""
    checkpoint_every_k_blocks: int = Field(default=1, ge=1)
    """Distance between recomputed blocks: every k-th block is recomputed."""
    reshard_after_forward: bool = True
    """Whether fsdp2 and zero3 free gathered weights between forward and backward: less memory, one more gather."""
    reduce_every_micro_batch: bool = True
    """Whether fsdp2 reduce-scatters gradients after each micro batch. If false, it does so once a step, and each rank
    holds whole gradients until then."""
    cpu_offload: bool = False
    """Whether zero1, zero2 and zero3 keep the optimizer state in host memory."""
    compile: bool = False
    """Whether torch.compile compiles each block, and the chunks of the loss."""
    async_tensor: bool = False
    """Whether compiled blocks exchange the activations of tensor parallelism in parts, beside the products that read or
    make them. CUDA alone; the ranks of the `tensor` axis must be on one node."""
    cuda_graphs: bool = False
    """Whether single and ddp replay the passes of a micro batch as one CUDA graph. That saves the host's time to launch
    kernels, which counts in small models, and keeps the memory of the activations."""
    attention: Literal["auto", "flex", "flash", "cudnn", "products", "sdpa"] = "auto"
    """Form of attention: flex, flash or cudnn on CUDA, products or sdpa on a CPU; auto chooses by what the device
    supports."""
    activation_memory_budget: float = Field(default=1.0, ge=0, le=1)
    """Share of a block's activations that compiled blocks keep. The compiler recomputes those that cost least."""
    device: str = "auto"
    """Device type: auto, cpu, cuda, or another accelerator that torch supports."""
    timeout_seconds: float = Field(default=600.0, gt=0, le=31_536_000)
    """Seconds that a collective may take before the run aborts; at most a year."""

    @model_validator(mode="after")
    def _combinations(self) -> "ParallelConfig":
        """`replicate`, `shard` and `reduce_every_micro_batch` are for `fsdp2` only. `tensor` is for `fsdp2` and `ddp`.
        `reshard_after_forward` is for `fsdp2` and `zero3`. `cpu_offload` is for `zero1`, `zero2` and `zero3`.
        `checkpoint_every_k_blocks` needs `activation_checkpointing`."""
        if self.shard == 0:
            raise ValueError("shard (0) must be at least 1; set it to -1 to use the remaining ranks")
        if self.engine != "fsdp2":
            self._only_with("fsdp2", "replicate", 1, "the other engines replicate or shard over all ranks")
            self._only_with("fsdp2", "shard", -1, "the other engines replicate or shard over all ranks")
            self._only_with("fsdp2", "reduce_every_micro_batch", True, "the other engines have no such choice")
        if self.engine not in ("fsdp2", "ddp"):
            self._only_with("fsdp2 or ddp", "tensor", 1, "DeepSpeed and a single process do not split matrices")
        if self.engine not in ("fsdp2", "zero3"):
            self._only_with("fsdp2 or zero3", "reshard_after_forward", True, "the other engines gather no weights")
        if not self.engine.startswith("zero"):
            self._only_with(
                "zero1, zero2 or zero3", "cpu_offload", False, "the other engines keep all state on the device"
            )
        if self.activation_checkpointing == "none" and self.checkpoint_every_k_blocks != 1:
            raise ValueError(
                f"checkpoint_every_k_blocks ({self.checkpoint_every_k_blocks}) has no effect while "
                "activation_checkpointing is none; set that to full or selective, or this to 1"
            )
        return self

    @model_validator(mode="after")
    def _fp8(self) -> "ParallelConfig":
        """`precision: fp8` needs `compile: true`. It does not work with `zero1`, `zero2` and `zero3`, nor with `tensor`
        above 1. `fp8_scaling` is for `precision: fp8`."""
        if self.precision == "fp8" and self.engine.startswith("zero"):
            self._only_with("single, ddp or fsdp2", "precision", "bf16", "torchao's layers do not support DeepSpeed")
        if self.precision == "fp8" and self.tensor != 1:
            raise ValueError(
                f"precision (fp8) does not work with tensor ({self.tensor}): layers in fp8 cannot be split yet; "
                "set precision to bf16, or tensor to 1"
            )
        if self.precision == "fp8" and not self.compile:
            raise ValueError(
                "precision (fp8) needs compile (false): without the compiler each cast to fp8 is an operation of its "
                "own, and a step takes longer than in bf16; set compile to true, or precision to bf16"
            )
        if self.precision != "fp8" and self.fp8_scaling != "rowwise":
            raise ValueError(
                f"fp8_scaling ({self.fp8_scaling}) has no effect while precision is {self.precision}; "
                "set precision to fp8, or fp8_scaling to rowwise"
            )
        return self

    @property
    def gathers_fp8(self) -> bool:
        """Whether fsdp2 gathers the matrices of blocks in fp8. torchao can do so with one scale for each tensor."""
        return self.engine == "fsdp2" and self.precision == "fp8" and self.fp8_scaling == "tensorwise"

    @model_validator(mode="after")
    def _async(self) -> "ParallelConfig":
        """`async_tensor: true` needs `tensor` above 1 and `compile: true`."""
        if self.async_tensor and (self.tensor == 1 or not self.compile):
            raise ValueError(
                f"async_tensor (true) needs tensor ({self.tensor}) above 1 and compile ({_yaml(self.compile)}): the "
                "compiler joins the exchanges of tensor parallelism with products; set compile to true and tensor to 2 "
                "or more, or async_tensor to false"
            )
        return self

    @model_validator(mode="after")
    def _graphs(self) -> "ParallelConfig":
        """`cuda_graphs: true` is for `single` and `ddp`, with `tensor: 1`, `activation_checkpointing: none` and another
        `attention` than `flash`."""
        if not self.cuda_graphs:
            return self
        if self.engine not in ("single", "ddp"):
            self._only_with("single or ddp", "cuda_graphs", False, "the other engines gather weights in each pass")
        for name, neutral, works, reason in (
            ("tensor", 1, self.tensor == 1, "a graph has no collectives"),
            (
                "activation_checkpointing",
                "none",
                self.activation_checkpointing == "none",
                "graphs are for small models",
            ),
            ("attention", "auto", self.attention != "flash", "that form waits for the device in each micro batch"),
        ):
            if not works:
                raise ValueError(
                    f"cuda_graphs (true) does not work with {name} ({getattr(self, name)}): {reason}; "
                    f"set cuda_graphs to false, or {name} to {neutral}"
                )
        return self

    @model_validator(mode="after")
    def _budget(self) -> "ParallelConfig":
        """`activation_memory_budget` below 1 needs `compile: true` and `activation_checkpointing: none`."""
        budget = self.activation_memory_budget
        if budget != 1 and not (self.compile and self.activation_checkpointing == "none"):
            raise ValueError(
                f"activation_memory_budget ({budget:g}) needs the compiler, which then replaces "
                "activation_checkpointing; set compile to true and activation_checkpointing to none, or the budget to 1"
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
        """Raise ValueError if tensor parallelism cannot split the model evenly, or fp8 cannot multiply its matrices."""
        sizes = {"seq_len": seq_len, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_ff": d_ff}
        for name, size in {**sizes, "vocab_size": vocab_size}.items():
            if size % self.tensor:
                all_sizes = [*sizes.values(), vocab_size]
                smaller = max(n for n in range(1, self.tensor) if not any(other % n for other in all_sizes))
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
    """The value as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
