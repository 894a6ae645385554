"""Other systems' parameter names, and how their tensors lie, translated to this model's. Pure.

D d_model, H heads of a projection, E head width.

| source     | names                              | what differs besides names                                        |
| ---------- | ---------------------------------- | ----------------------------------------------------------------- |
| keepstep   | as they are                        |                                                                   |
| torchtitan | `layers.0.attention.wq`            | RoPE turns neighbours, not halves: rows of query and key reordered |
| Llama      | `model.layers.0.self_attn.q_proj`  |                                                                   |
| GPT-2      | `transformer.h.0.attn.c_attn`      | query, key, value in one; matrices transposed                     |
"""

from collections.abc import Mapping

from torch import Tensor

from train.model.config import ModelConfig

TORCHTITAN = {
    "tok_embeddings": "embed",
    "output": "head",
    "attention.wq": "attention.query",
    "attention.wk": "attention.key",
    "attention.wv": "attention.value",
    "attention.wo": "attention.output",
    "attention.q_norm": "attention.query_norm",
    "attention.k_norm": "attention.key_norm",
    "feed_forward.w1": "mlp.gate",
    "feed_forward.w3": "mlp.up",
    "feed_forward.w2": "mlp.down",
    "ffn_norm": "mlp_norm",
}
LLAMA = {
    "embed_tokens": "embed",
    "lm_head": "head",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
GPT2 = {
    "wte": "embed",
    "wpe": "positions",
    "ln_f": "norm",
    "lm_head": "head",
    "ln_1": "attention_norm",
    "ln_2": "mlp_norm",
    "attn.c_proj": "attention.output",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}


def translate(theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors of one kind (weights, or one moment) by this model's names. Names that are not known stay."""
    theirs = {name.removeprefix("model.").removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    if "tok_embeddings.weight" in theirs:
        ours = {_renamed(name, TORCHTITAN): tensor for name, tensor in theirs.items()}
        return {name: _halves(name, tensor, config) for name, tensor in ours.items()}
    if "embed_tokens.weight" in theirs:
        return {_renamed(name, LLAMA): tensor for name, tensor in theirs.items() if "rotary" not in name}
    if "wte.weight" in theirs:
        return _gpt2(theirs)
    return dict(theirs)


def _renamed(name: str, table: Mapping[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    layer = ""
    if module.startswith(("layers.", "h.")):
        _, number, module = module.split(".", 2)
        layer = f"layers.{number}."
    return f"{layer}{table.get(module, module)}.{kind}"


def _halves(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows (2i, 2i + 1) of each head become rows (i, i + E/2)."""
    module = name.rsplit(".", 1)[0]
    if not module.endswith(("attention.query", "attention.key", "attention.query_norm", "attention.key_norm")):
        return tensor
    pairs = tensor.reshape(-1, config.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _gpt2(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ours: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # the causal mask
            continue
        layer, _, _ = name.partition(".attn.")
        if ".c_" in name and name.endswith("weight"):
            tensor = tensor.T
        if ".attn.c_attn." in name:
            kind = name.rsplit(".", 1)[1]
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                ours[f"layers.{layer.removeprefix('h.')}.attention.{part}.{kind}"] = piece
        else:
            ours[_renamed(name, GPT2)] = tensor
    return ours
