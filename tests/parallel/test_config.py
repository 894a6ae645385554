import pytest
from pydantic import ValidationError

from parallel.config import ParallelConfig

MODEL = {"seq_len": 64, "n_heads": 8, "n_kv_heads": 2, "d_model": 64, "d_ff": 128, "vocab_size": 256}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"shard": 0}, r"shard \(0\) must be at least 1; set it to -1"),
        ({"engine": "ddp", "replicate": 2}, r"replicate \(2\) is for engine fsdp2, not ddp: .*; set engine to fsdp2"),
        ({"engine": "zero3", "shard": 2}, r"shard \(2\) is for engine fsdp2, not zero3"),
        ({"engine": "zero2", "tensor": 2}, r"tensor \(2\) is for engine fsdp2 or ddp, not zero2: DeepSpeed"),
        ({"engine": "single", "tensor": 2}, r"tensor \(2\) is for engine fsdp2 or ddp, not single"),
        (
            {"engine": "ddp", "reshard_after_forward": False},
            r"reshard_after_forward \(false\) is for engine fsdp2 or zero3, not ddp: .* reshard_after_forward to true",
        ),
        (
            {"engine": "zero2", "reduce_every_micro_batch": False},
            "reduce_every_micro_batch .false. is for engine fsdp2",
        ),
        (
            {"engine": "fsdp2", "cpu_offload": True},
            r"cpu_offload \(true\) is for engine zero1, zero2 or zero3, not fsdp2",
        ),
        ({"checkpoint_every_k_blocks": 2}, r"checkpoint_every_k_blocks \(2\) has no effect while .* is none; set that"),
        (
            {"activation_memory_budget": 0.5},
            r"activation_memory_budget \(0.5\) needs the compiler.*; set compile to true and .* to none",
        ),
        (
            {"engine": "zero3", "precision": "fp8"},
            r"precision \(fp8\) is for engine single, ddp or fsdp2, not zero3: .*; set .* or precision to bf16",
        ),
        (
            {"async_tensor": True, "compile": True},
            r"async_tensor \(true\) needs tensor \(1\) above 1 and compile \(true\): .*, or async_tensor to false",
        ),
        (
            {"async_tensor": True, "tensor": 2},
            r"async_tensor \(true\) needs tensor \(2\) above 1 and compile \(false\): ",
        ),
        (
            {"cuda_graphs": True},
            r"cuda_graphs \(true\) is for engine single or ddp, not fsdp2: .* cuda_graphs to false",
        ),
        (
            {"engine": "ddp", "cuda_graphs": True, "tensor": 2},
            r"cuda_graphs \(true\) does not work with tensor \(2\): .*; set cuda_graphs to false, or tensor to 1",
        ),
        (
            {"engine": "single", "cuda_graphs": True, "activation_checkpointing": "full"},
            r"does not work with activation_checkpointing \(full\): .*, or activation_checkpointing to none",
        ),
        (
            {"engine": "single", "cuda_graphs": True, "attention": "flash"},
            r"does not work with attention \(flash\): that form waits for the device .*, or attention to auto",
        ),
        (
            {"precision": "fp8"},
            r"precision \(fp8\) needs compile \(false\): .*; set compile to true, or precision to bf16",
        ),
        (
            {"fp8_scaling": "tensorwise"},
            r"fp8_scaling \(tensorwise\) has no effect while precision is bf16; set precision to fp8, or fp8",
        ),
        (
            {"tensor": 2, "precision": "fp8"},
            r"precision \(fp8\) does not work with tensor \(2\): .*; set precision to bf16, or tensor to 1",
        ),
    ],
)
def test_impossible_combinations_are_refused_with_a_way_out(settings: dict, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        ParallelConfig(**settings)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (4, r"model.n_kv_heads \(2\) must be a multiple of parallel.tensor \(4\).*; set parallel.tensor to 2"),
        (3, r"model.seq_len \(64\) must be a multiple of parallel.tensor \(3\).*; set parallel.tensor to 2"),
    ],
)
def test_a_model_that_cannot_be_split_evenly_is_refused(tensor: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ParallelConfig(tensor=tensor).check_model(**MODEL)


def test_a_model_that_can_be_split_evenly_is_accepted() -> None:
    ParallelConfig(tensor=2).check_model(**MODEL)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"d_ff": 100}, r"model.d_ff \(100\) must be a multiple of 16 .* or set parallel.precision to bf16"),
        ({"seq_len": 40}, r"model.seq_len \(40\) must be a multiple of 16"),
        ({"n_kv_heads": 1}, r"model.n_kv_heads x d_model / n_heads \(8\) must be a multiple of 16"),
    ],
)
def test_fp8_accepts_only_sizes_that_are_multiples_of_16(change: dict[str, int], text: str) -> None:
    in_fp8 = ParallelConfig(precision="fp8", compile=True)
    in_fp8.check_model(**MODEL)
    ParallelConfig(precision="bf16").check_model(**MODEL | change)
    with pytest.raises(ValueError, match=text):
        in_fp8.check_model(**MODEL | change)
