"""Counts characters that a tokenizer drops: it has neither a token nor bytes for them, and no unknown token either.

A model drops single characters, whatever stands beside them. So each character is tested once in a process, by encoding
and decoding it, and every document is counted in full. What the tokenizer's normalizer removes is not counted, nor is
white space, which many tokenizers do not keep, nor text that the unknown token stands for.
"""

from collections.abc import Sequence

from data_pipeline.tokenizers.tokenizer import Tokenizer

_SPACE = "\u2581"  # SentencePiece's mark for a space in normalized text


class LossCounter:
    """Counts the characters that one tokenizer loses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: set[str] = {_SPACE}
        self._lost: set[str] = set()
        self._loses_ascii = any(self._loses(chr(code)) for code in range(128))

    def count(self, texts: Sequence[str]) -> int:
        """Number of characters of the texts, once normalized, that no token stands for."""
        return sum(self._count(text) for text in texts if self._loses_ascii or not text.isascii())

    def _count(self, text: str) -> int:
        normalized = self._tokenizer.normalize(text)
        characters = set(normalized)
        for character in characters - self._kept - self._lost:
            (self._lost if self._loses(character) else self._kept).add(character)
        return sum(normalized.count(character) for character in characters & self._lost)

    def _loses(self, character: str) -> bool:
        wanted = self._tokenizer.normalize(character)
        if not wanted.strip():
            return False
        twice = 2 * character  # the second one stands within a word, where another token may be used
        try:
            ids = self._tokenizer.encode(twice)
        except Exception:  # some models refuse such a text, so a document cannot lose it silently
            return False
        if self._tokenizer.unknown in ids:
            return False
        return wanted not in self._tokenizer.normalize(self._tokenizer.decode(ids))
