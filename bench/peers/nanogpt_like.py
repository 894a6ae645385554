"""A plain loop in the style of nanoGPT, written for this benchmark: a GPT-2 style model, autocast, fused AdamW, DDP.

B micro batch, T sequence, D width, V vocabulary.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from protocol import Spec, read_spec, serve
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block of attention and a feed-forward layer."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        D = spec.d_model
        self.heads = spec.n_heads
        self.norm1, self.norm2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The block's output, shape (B, T, D)."""
        B, T, D = x_BTD.shape
        q, k, v = (
            part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x_BTD)).split(D, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class Plain(nn.Module):
    """A GPT-2 style model with tied embeddings."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.embed, self.positions = (
            nn.Embedding(spec.vocab_size, spec.d_model),
            nn.Embedding(spec.seq_len, spec.d_model),
        )
        self.blocks = nn.ModuleList([Block(spec) for _ in range(spec.n_layers)])
        self.norm = nn.LayerNorm(spec.d_model, bias=False)
        self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """The mean loss in nats per label, shape ()."""
        x_BTD = self.embed(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1]))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def main() -> None:
    """Serve steps of the plain loop. Collective."""
    spec = read_spec()
    torch.set_num_threads(spec.threads)
    model: nn.Module = Plain(spec)
    if spec.compile:
        model.compile()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        tokens_BT = torch.randint(spec.vocab_size, (spec.micro_batch_size, spec.seq_len))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens_BT, tokens_BT.roll(-1, 1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    serve(spec, step)


if __name__ == "__main__":
    main()
