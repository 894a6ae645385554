"""The text of a continuation as it grows: what can be shown already, and where a stop string ends it."""

from collections.abc import Sequence
from typing import Literal

from data_pipeline.tokenizers.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
"""What tokenizers give for bytes that are not yet a whole character."""


class Continuation:
    """The text after a prompt. `add` takes its tokens one by one."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._prompt, self._stops = tokenizer, list(prompt), [stop for stop in stops if stop]
        self._before = len(tokenizer.decode(self._prompt))
        self._shown = 0
        self.tokens: list[int] = []
        self.text = ""
        """All text, without a stop string and what follows it."""
        self.finish: Literal["stop", "length"] | None = None
        """Why the text ended: at a stop string or at the end of the document, or at the most tokens."""

    def add(self, token: int) -> str:
        """Add a token; returns the new text that no later token can change. `finish` is set if a stop string ends it.

        The whole text is decoded again, since a token's text depends on those before it."""
        self.tokens.append(token)
        self.text = self._tokenizer.decode([*self._prompt, *self.tokens])[self._before :]
        found = [at for stop in self._stops if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            return self.end("stop")
        return self._show(len(self.text.rstrip(_INCOMPLETE)) - self._begun_stop())

    def end(self, finish: Literal["stop", "length"]) -> str:
        """End the text; returns what was not yet shown."""
        self.finish = finish
        return self._show(len(self.text))

    def _begun_stop(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        whole = self.text.rstrip(_INCOMPLETE)
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if whole.endswith(stop[:n]))
        return max(lengths, default=0)

    def _show(self, until: int) -> str:
        new = self.text[self._shown : until]
        self._shown = max(self._shown, until)
        return new
