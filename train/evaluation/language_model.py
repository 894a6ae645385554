"""The adapter through which lm-evaluation-harness asks a model. Importing it imports the harness.

It tokenizes and cuts texts as the harness's own class for Hugging Face models does (`hf`), so both give the same
results for a model and its exported folder.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from data_pipeline.tokenizers.tokenizer import Tokenizer
from train.errors import ConfigError
from train.evaluation.queries import Model, Query

MAX_NEW_TOKENS = 256
"""Tokens that a task gets which states no number."""


class KeepstepLM(TemplateLM):
    """A model with its tokenizer, as the harness asks it. `seq_len`: tokens of the longest context."""

    def __init__(self, model: Model, tokenizer: Tokenizer, seq_len: int) -> None:
        super().__init__()
        self._model, self._text, self._seq_len = model, tokenizer, seq_len

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._text.end_of_document

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: the one that begins a document, or else ends one."""
        begin = self._text.beginning_of_document
        return self._text.end_of_document if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """A name for caches of requests, which are not used."""
        return "keepstep"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text. The token that begins documents, if there is one, is first unless it is not wanted."""
        begin = self._text.beginning_of_document
        ids = self._text.encode(string)
        return ids if begin is None or add_special_tokens is False else [begin, *ids]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the most likely one."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        queries = [
            Query(tuple((context + continuation)[-(self._seq_len + 1) :]), min(len(continuation), self._seq_len))
            for _, context, continuation in requests
        ]
        return [(answer.log_probability, bool(answer.most_likely)) for answer in self._model(queries)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """The log-probability of each whole text, in windows of the model's length."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts: list[int] = []
        for request in requests:
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._seq_len,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in cut]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The most likely continuation of each context, up to a stop or the number of tokens that the task states.

        ConfigError if a task wants sampled texts."""
        texts = [_Continued(self, *request.args) for request in requests]
        while going := [text for text in texts if not text.is_over]:
            for text, answer in zip(going, self._model([text.query for text in going]), strict=True):
                text.add(answer.most_likely)
        return [text.result for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self._text.decode(ids)

    @property
    def seq_len(self) -> int:
        """Tokens of the longest context."""
        return self._seq_len


class _Continued:
    """A context and the tokens that were added to it."""

    def __init__(self, lm: KeepstepLM, context: str, settings: dict[str, Any]) -> None:
        if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
            raise ConfigError(
                "a task asks for sampled texts (do_sample: true), but only the most likely ones are generated; set "
                "do_sample to false in its generation_kwargs"
            )
        until = settings.get("until") or []
        self._stops = [until] if isinstance(until, str) else list(until)
        self._left = int(settings.get("max_gen_toks", MAX_NEW_TOKENS))
        room = lm.seq_len - self._left
        if room <= 0:
            raise ConfigError(
                f"a task generates up to {self._left} tokens (max_gen_toks), but the model's context has {lm.seq_len}; "
                "set max_gen_toks in its generation_kwargs"
            )
        self._lm, self._context, self._new = lm, lm.tok_encode(context)[-room:] or [lm.prefix_token_id], list[int]()
        self.is_over = False

    @property
    def query(self) -> Query:
        """The context and all new tokens."""
        return Query((*self._context, *self._new))

    def add(self, token: int) -> None:
        """Add a token, or end the text where the document ends."""
        if token == self._lm.eot_token_id:
            self.is_over = True
            return
        self._new.append(token)
        self._left -= 1
        self.is_over = self._left == 0 or any(stop in self._lm.decode(self._new) for stop in self._stops if stop)

    @property
    def result(self) -> str:
        """The new text before the first stop."""
        text = self._lm.decode(self._new)
        return text[: min([len(text), *(text.find(stop) for stop in self._stops if stop and stop in text)])]
