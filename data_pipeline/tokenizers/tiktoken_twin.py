"""A byte-level BPE of Hugging Face encoded by tiktoken, which is several times faster, where both give the same ids.

Only a tokenizer that consists of nothing else is taken: no normalizer, a byte-level split by one pattern, no unknown
token, merges in the order of their ids. Then every token of the vocabulary and a set of awkward texts must come out the
same. That is strong evidence, not a proof for all texts, so each batch is checked anew on one of its documents, and
goes to Hugging Face if that differs.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

Encode = Callable[[Sequence[str]], list[list[int]]]

_PROBES = (
    "",
    " ",
    "a",
    "Hello, world! It's 12345 o'clock\n\n\tand  all's well   \r\n",
    "def f(x):\n    return x ** 2  # \u00e9\u4e2d\u6587\u0391\U0001f600\u200d\ufeff\u00a0\u2028\u3000x\n" * 3,
    "".join(map(chr, range(0x250))),
    "<|endoftext|> </s> [PAD]",
    "'S 'T ''re 's's \u2019s 1\u0661\u00b2\u2160",
)


def tiktoken_twin(file: Path, encode: Encode) -> Encode | None:
    """An encoder of batches that gives the ids of `encode`, the tokenizer of `file`; None if there is none."""
    try:
        import tiktoken
    except ImportError:
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    pattern, ranks = _pattern(content), _ranks(content)
    if pattern is None or ranks is None:
        return None
    twin = tiktoken.Encoding(file.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    words = [token.decode(errors="ignore") for token in ranks]
    probes = [*_PROBES, *words, *(f" {word}x" for word in words)]
    if [twin.encode_ordinary(text) for text in probes] != encode(probes):
        return None

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        ids = [twin.encode_ordinary(text) for text in texts]
        if texts and encode(texts[:1]) != ids[:1]:
            return encode(texts)
        return ids

    return encode_batch


def _pattern(content: dict[str, Any]) -> str | None:
    """How text is split, if by a byte-level pattern alone."""
    before = content["pre_tokenizer"]
    steps = before["pretokenizers"] if before and before["type"] == "Sequence" else [before]
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
    return None


def _ranks(content: dict[str, Any]) -> dict[bytes, int] | None:
    """Bytes of each token -> id, if ids follow the order of merges and nothing else is in the way."""
    model = content["model"]
    plain = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout", "byte_fallback")
    if content["normalizer"] is not None or model["type"] != "BPE" or any(model.get(name) for name in plain):
        return None
    if not all(token["special"] for token in content["added_tokens"]):
        return None
    special = {token["content"] for token in content["added_tokens"]}
    letters = _bytes_of_letters()
    vocabulary = {token: number for token, number in model["vocab"].items() if token not in special}
    if any(letter not in letters for token in vocabulary for letter in token):
        return None
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    ids = [vocabulary.get("".join(merge), -1) for merge in merges]
    single = {token for token in vocabulary if len(token) == 1}
    if ids != sorted(set(ids)) or -1 in ids or len(single) != 256 or len(single) + len(ids) != len(vocabulary):
        return None
    return {bytes(letters[letter] for letter in token): number for token, number in vocabulary.items()}


def _bytes_of_letters() -> dict[str, int]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
