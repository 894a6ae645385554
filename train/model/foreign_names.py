"""Names of modules in Hugging Face's models, assembled from the tables of this model's module classes.

Each table maps our name to theirs. Names inside a block are relative to it (`attention.query`); the others are whole
(`embed`). Blocks are `model.layers.N` in Llama and `transformer.h.N` in GPT-2. GPT-2 stores query, key and value as one
matrix, `attn.c_attn`, which the table leaves out.
"""

from train.model.attention_layer import Attention
from train.model.block import Block
from train.model.gpt import GPT
from train.model.mlp import GELU, SwiGLU
from train.model.parameters import under

LLAMA: dict[str, str] = {
    **GPT.llama,
    **Block.llama,
    **under("attention", Attention.llama),
    **under("mlp", SwiGLU.llama),
}
GPT2: dict[str, str] = {
    **GPT.gpt2,
    **Block.gpt2,
    **under("attention", Attention.gpt2),
    **under("mlp", GELU.gpt2),
}
