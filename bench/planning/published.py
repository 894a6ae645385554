"""Published training speeds (bench/published/throughput.csv) as models and arrangements that the plan understands."""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from launch.plan.shapes import Arrangement, Engine, Experts, ModelShape, Recomputation

FILE = Path(__file__).parents[1] / "published" / "throughput.csv"
MISPRINTED = {"dgxc-175", "dgxc-178", "bloom-042"} | {f"nemo-0{n}" for n in range(13, 21)}
"""Rows whose figures contradict themselves (bench/published/README.md)."""
GPUS = {"A100": "a100", "H100-96GB-HBM2e-500W": "h100-500w", "H100-95GB-HBM2e": "h100-500w"}
"""Names of machines that differ from launch/plan/machines.yaml, but for case."""
NOT_GATED = ("GPT", "MPT", "BLOOM", "Nemotron")
DENSE_LAYERS = {"DeepSeek-V3": 3, "Kimi-K2": 1, "Llama-4-Maverick": 24}
"""Blocks without experts, from the models' configurations; 0 for the others."""
SHARED = {"DeepSeek-V3": 1, "Kimi-K2": 1, "Llama-4-Maverick": 1}
EXPERT_WIDTH = {"Llama-4-Maverick": 8192}
HEAD_WIDTH = {"Qwen3-30B-A3B": 128, "Qwen3-235B-A22B": 128, "GPT-OSS-120B": 64, "DeepSeek-V3": 128, "Kimi-K2": 128}
VOCABULARY = {"Nemotron-8B": 256_000, "Nemotron-22B": 256_000, "GPT3-5B": 51_200}
"""What rows leave out, from the models' configurations."""


@dataclass(frozen=True)
class Row:
    """One published run."""

    id: str
    source: str
    date: str
    system: str
    model_name: str
    gpu: str
    model: ModelShape
    arrangement: Arrangement
    tokens_per_second: float
    """Per GPU."""
    memory_gb: float | None

    @property
    def release(self) -> tuple[str, str, str]:
        """The system, its date and the kind of model: one scale may be fitted for each."""
        return self.system, self.date, "dense" if self.is_dense else "experts"

    @property
    def is_dense(self) -> bool:
        """Whether the model has no experts."""
        return self.model.experts is None


def read_rows(path: Path = FILE) -> list[Row]:
    """Rows on GPUs whose layout is known in full and whose figures agree."""
    with path.open(encoding="utf-8", newline="") as file:
        found = [_row(line) for line in csv.DictReader(file) if line["accel"] == "gpu" and line["layout_full"] == "y"]
    return [row for row in found if row is not None and row.id not in MISPRINTED]


def _row(line: dict[str, str]) -> Row | None:
    """None if the row lacks the model's sizes, the batch or the speed."""
    if not all(line[name] for name in ("layers", "d_model", "heads", "global_batch")):
        return None
    if not (line["d_ff"] or line["d_ff_expert"]):
        return None
    model, arrangement = _model(line), _arrangement(line)
    speed = _number(line, "tokens_s_gpu")
    seconds = _number(line, "step_s")
    if not speed and seconds:
        speed = float(line["global_batch"]) * model.seq_len / seconds / float(line["gpus"])
    if not speed or arrangement is None:
        return None
    return Row(
        id=line["id"],
        source=line["source"].split()[0],
        date=line["date"],
        system=line["system"],
        model_name=line["model"],
        gpu=GPUS.get(line["gpu_type"], line["gpu_type"].lower()),
        model=model,
        arrangement=arrangement,
        tokens_per_second=speed,
        memory_gb=_number(line, "memory_gb"),
    )


def _model(line: dict[str, str]) -> ModelShape:
    name, d_model, heads = line["model"], int(float(line["d_model"])), int(float(line["heads"]))
    experts = None
    if line["n_experts"]:
        experts = Experts(
            number=int(float(line["n_experts"])),
            per_token=int(float(line["top_k"])),
            d_ff=EXPERT_WIDTH.get(name) or int(float(line["d_ff_expert"] or line["d_ff"])),
            shared=SHARED.get(name, 0),
            dense_layers=DENSE_LAYERS.get(name, 0),
        )
    return ModelShape(
        n_layers=int(float(line["layers"])),
        d_model=d_model,
        n_heads=heads,
        n_kv_heads=int(_number(line, "kv_heads") or heads),
        head_dim=HEAD_WIDTH.get(name) or d_model // heads,
        d_ff=int(float(line["d_ff"] or line["d_ff_expert"])),
        vocab_size=int(_number(line, "vocab") or VOCABULARY[name]),
        seq_len=int(float(line["seq_len"])),
        gated=not name.startswith(NOT_GATED) or name.startswith("GPT-OSS"),
        experts=experts,
    )


def _arrangement(line: dict[str, str]) -> Arrangement | None:
    """None if a step has less than one micro batch."""
    tensor, pipeline, context, expert = (int(_number(line, name) or 1) for name in ("tp", "pp", "cp", "ep"))
    data = int(float(line["gpus"])) // (tensor * pipeline * context)
    micro_batch = int(_number(line, "micro_batch") or 1)
    micro_batches = round(float(line["global_batch"]) / (data * micro_batch), 3)
    if micro_batches < 1:
        return None
    return Arrangement(
        data=data,
        shard=_shard(line["fsdp"], data),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        virtual_stages=max(1, int(_number(line, "vpp") or 1)),
        engine=_engine(line["fsdp"]),
        micro_batch_size=micro_batch,
        micro_batches=round(micro_batches),
        precision={"16bit": "bf16"}.get(line["precision"], line["precision"]),
        recomputation=_recomputation(line),
    )


def _recomputation(line: dict[str, str]) -> Recomputation:
    """What Megatron-LM calls selective recomputes attention alone."""
    if line["recompute"] == "full":
        return "full"
    if line["recompute"].startswith(("selective", "save_dot")):
        return "attention" if line["system"].startswith("Megatron-LM") else "selective"
    return "none"


def _engine(words: str) -> Engine:
    """Whatever is not said to shard weights is taken for a distributed optimizer, as all these systems have one."""
    if words in ("zero-0", "zero-2"):
        return "ddp" if words == "zero-0" else "zero2"
    shards = "fsdp" in words or words.startswith("FSDP") or words in ("zero-3", "hsdp")
    return "fsdp2" if shards else "zero1"


def _shard(words: str, data: int) -> int:
    if words == "hsdp":
        return min(8, data)
    found = re.match(r"(?:fsdp|fsdp2 full shard) (\d+)", words)
    return int(found[1]) if found else data


def _number(line: dict[str, str], name: str) -> float | None:
    return float(line[name]) if line[name] else None
