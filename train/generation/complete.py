"""Completes texts with a trained model: from prompts to continuations, step by step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from train.errors import ConfigError
from train.generation.decoder import Decoder
from train.generation.open_model import Opened
from train.generation.sampling import Sampling
from train.generation.text import Continuation


@dataclass(frozen=True)
class Request:
    """What to generate."""

    prompts: Sequence[str]
    max_tokens: int
    sampling: Sampling
    seeds: Sequence[int]
    """One for each prompt: same prompt, seed and settings, same text."""
    stops: Sequence[str] = ()
    """Strings before which a text ends."""


@dataclass
class Completion:
    """The continuations of a request, which grow with each step of `steps`."""

    prompts: list[str]
    """The prompts as the tokenizer decodes them."""
    prompt_tokens: list[int]
    """Number of tokens of each prompt."""
    rows: list[Continuation]
    cache_bytes: int
    """Memory of the cache of keys and values."""
    steps: Iterator[dict[int, str]]
    """The new text of each row that grew or ended, one token at a time."""


def complete(opened: Opened, request: Request) -> Completion:
    """Begin the continuations; iterate over `steps` to compute them. ConfigError if a prompt has no tokens."""
    tokenizer = opened.tokenizer
    prompts = tokenizer.encode_batch(list(request.prompts))
    begin = [] if tokenizer.beginning_of_document is None else [tokenizer.beginning_of_document]
    if not all([*begin, *prompt] for prompt in prompts):
        raise ConfigError("a prompt is empty; the model continues the beginning of a document, so give at least a word")
    decoder = Decoder(
        opened.model,
        [[*begin, *prompt] for prompt in prompts],
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        seeds=request.seeds,
    )
    rows = [Continuation(tokenizer, prompt, request.stops) for prompt in prompts]
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    return Completion(texts, [len(p) + len(begin) for p in prompts], rows, decoder.cache.bytes, _steps(decoder, rows))


def _steps(decoder: Decoder, rows: Sequence[Continuation]) -> Iterator[dict[int, str]]:
    while chosen := decoder.step():
        new: dict[int, str] = {}
        for row, token in chosen.items():
            new[row] = rows[row].end("stop") if token is None else rows[row].add(token)
            if rows[row].finish is not None:
                decoder.live.discard(row)
        yield new
    yield {row: text.end("length") for row, text in enumerate(rows) if text.finish is None}
