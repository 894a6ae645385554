"""litgpt's model, loss and Fabric, as its `pretrain` command uses them, in bf16 with fp32 masters."""

import os

import lightning  # pyright: ignore[reportMissingImports]
import torch
from litgpt import GPT, Config  # pyright: ignore[reportMissingImports]
from litgpt.utils import chunked_cross_entropy  # pyright: ignore[reportMissingImports]
from protocol import read_spec, serve


def main() -> None:
    """Serve steps of litgpt. Collective."""
    spec = read_spec()
    torch.set_num_threads(spec.threads)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = lightning.Fabric(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", precision="bf16-mixed"
    )
    fabric.launch()
    config = Config(
        name="bench",
        block_size=spec.seq_len,
        vocab_size=spec.vocab_size,
        padded_vocab_size=spec.vocab_size,
        n_layer=spec.n_layers,
        n_head=spec.n_heads,
        n_embd=spec.d_model,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=spec.d_ff,
    )
    with fabric.init_module():
        model = GPT(config)
    model.transformer.wte.weight = model.lm_head.weight
    model = fabric.setup(torch.compile(model) if spec.compile else model)
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    )

    def step() -> None:
        tokens_BT = torch.randint(spec.vocab_size, (spec.micro_batch_size, spec.seq_len))
        loss = chunked_cross_entropy(model(tokens_BT), tokens_BT.roll(-1, 1), chunk_size=0)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    serve(spec, step)


if __name__ == "__main__":
    main()
