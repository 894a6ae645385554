"""DeepSpeed's own engine around a Hugging Face Llama: bf16 with fp32 masters, ZeRO-1."""

import os

import deepspeed
import torch
import torch.distributed as dist
from hugging_face import build_llama
from protocol import read_spec, serve


def main() -> None:
    """Serve steps of DeepSpeed's engine. Collective."""
    spec = read_spec()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile for a minute
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed("gloo", verbose=False, auto_mpi_discovery=False)
    model = build_llama(spec)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        config={
            "train_micro_batch_size_per_gpu": spec.micro_batch_size,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )
    if spec.compile:
        engine.compile()

    def step() -> None:
        tokens_BT = torch.randint(spec.vocab_size, (spec.micro_batch_size, spec.seq_len))
        engine.backward(engine(input_ids=tokens_BT, labels=tokens_BT).loss)
        engine.step()

    serve(spec, step)


if __name__ == "__main__":
    main()
