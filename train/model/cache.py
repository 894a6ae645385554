"""Keys and values of the tokens that a model has seen, so that the next token costs a forward pass of one token.

A key is stored at the position of its token. So the rows of a batch may have different lengths: what padding stores
lies after the last token of its row, no query sees it, and the next tokens overwrite it.

Shapes: L layers, B rows, S positions, T new tokens, K key/value heads, E head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from train.model.config import ModelConfig


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, and the new tokens' positions. It stands where `attend` expects boundaries."""

    keys_BSKE: Tensor
    values_BSKE: Tensor
    positions_BT: Tensor
    visible_B1TS: Tensor
    """True where query t may see the key at position s. S: up to the last position of a new token."""

    def extended(self, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store the new keys and values; returns all keys and values up to now, and the mask of the new queries."""
        rows_B1 = torch.arange(len(k_BTKE), device=k_BTKE.device)[:, None]
        self.keys_BSKE[rows_B1, self.positions_BT] = k_BTKE.to(self.keys_BSKE.dtype)
        self.values_BSKE[rows_B1, self.positions_BT] = v_BTKE.to(self.values_BSKE.dtype)
        until = self.visible_B1TS.shape[-1]
        return self.keys_BSKE[:, :until], self.values_BSKE[:, :until], self.visible_B1TS


class Cache:
    """The keys and values of all layers, for rows that begin at position 0 and are one document each."""

    def __init__(self, config: ModelConfig, rows: int, positions: int, like: Tensor) -> None:
        """`like` gives device and precision. Zeros: a hidden value is multiplied by 0, so it must be finite."""
        shape = (config.n_layers, rows, positions, config.kv_heads, config.head_dim)
        self._keys_LBSKE, self._values_LBSKE = like.new_zeros(shape), like.new_zeros(shape)

    @property
    def bytes(self) -> int:
        """Memory of the cache: 2 x layers x rows x positions x key/value heads x head width x bytes of a number."""
        return self._keys_LBSKE.nbytes + self._values_LBSKE.nbytes

    def at(self, positions_BT: Tensor) -> list[LayerCache]:
        """The cache of each layer for a forward pass of the tokens at these positions."""
        until = torch.arange(int(positions_BT.max()) + 1, device=positions_BT.device)
        visible_B1TS = (until <= positions_BT[..., None]).unsqueeze(1)
        layers = zip(self._keys_LBSKE, self._values_LBSKE, strict=True)
        return [LayerCache(keys, values, positions_BT, visible_B1TS) for keys, values in layers]
