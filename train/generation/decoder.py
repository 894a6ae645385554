"""Continues several token sequences at once, one token of each per step, with a cache of keys and values.

Shapes: B rows, T new tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from train.generation.sampling import Sampling, choose
from train.model.cache import Cache
from train.model.gpt import GPT

CHUNK = 256
"""Tokens of each row in one forward pass."""


class Decoder:
    """Continuations of prompts. A prompt is the beginning of a document, as in training.

    Each row has random numbers of its own, so its tokens do not depend on the other rows. A text longer than the
    model's `seq_len` goes on from its newest half of `seq_len`, which becomes the beginning of the context."""

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        end_of_document: int,
        max_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> None:
        """No prompt may be empty. Tokens from `vocab_size` on, which are padding of the embedding, are never chosen."""
        self._model, self._sampling = model, sampling
        self._vocab_size, self._end, self._left = vocab_size, end_of_document, max_tokens
        self._texts = [list(prompt) for prompt in prompts]
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._starts = [0] * len(prompts)
        """Where the context of each row begins in its text."""
        self.live = set(range(len(prompts)))
        """Rows that go on. Remove one to stop it."""
        self._full = model.config.seq_len
        size = min(self._full, max(map(len, prompts)) + max_tokens)
        self.cache = Cache(model.config, len(prompts), size, model.embed.weight.detach())
        self._has_begun = False

    @torch.inference_mode()
    def step(self) -> dict[int, int | None]:
        """The next token of each row that goes on; None where the document ends. Empty if all rows have ended."""
        if not self.live or self._left == 0:
            self.live.clear()
            return {}
        logits_BV = self._compute()[:, : self._vocab_size].float().cpu()
        self._left -= 1
        chosen: dict[int, int | None] = {}
        for row in sorted(self.live):
            token = choose(logits_BV[row], self._texts[row], self._sampling, self._generators[row])
            if token == self._end:
                self.live.remove(row)
            else:
                self._texts[row].append(token)
            chosen[row] = None if token == self._end else token
        return chosen

    def _compute(self) -> Tensor:
        """Logits of the token after each row's text: of the last token alone, or of whole contexts that begin."""
        lengths = [len(text) - start for text, start in zip(self._texts, self._starts, strict=True)]
        is_over = [length > self._full for length in lengths]
        if self._has_begun and not any(is_over):
            return self._forward([text[-1:] for text in self._texts], [length - 1 for length in lengths])
        self._has_begun = True
        kept = max(1, self._full // 2)
        for row, text in enumerate(self._texts):
            if is_over[row]:
                self._starts[row] = len(text) - kept
        contexts = [text[start:] for text, start in zip(self._texts, self._starts, strict=True)]
        return self._forward(contexts, [0] * len(contexts))

    def _forward(self, new: Sequence[Sequence[int]], first: Sequence[int]) -> Tensor:
        """Logits_BV after the new tokens of each row, of which the first has the given position.

        Short rows are padded at the end. Many tokens pass in chunks: logits of all of them would be large."""
        padded_BT = pad_sequence([torch.tensor(tokens) for tokens in new], batch_first=True)
        positions_BT = torch.tensor(first)[:, None] + torch.arange(padded_BT.shape[1])
        rows_B, last_B = torch.arange(len(new)), torch.tensor([len(tokens) - 1 for tokens in new])
        found_BV: Tensor | None = None
        for start in range(0, padded_BT.shape[1], CHUNK):
            tokens_BT = padded_BT[:, start : start + CHUNK]
            positions = positions_BT[:, start : start + CHUNK]
            logits_BTV = self._model(tokens_BT, positions, torch.zeros_like(tokens_BT), cache=self.cache)
            logits_BV = logits_BTV[rows_B, last_B.clamp(start, start + tokens_BT.shape[1] - 1) - start]
            found_BV = logits_BV if found_BV is None else logits_BV.where((last_B >= start)[:, None], found_BV)
        assert found_BV is not None, "no prompt is empty"
        return found_BV
