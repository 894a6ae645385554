"""Encodes a byte-level BPE of Hugging Face with tiktoken, which is several times faster, if both give the same ids.

A tokenizer qualifies only if it uses nothing that tiktoken lacks: no normalizer, a byte-level split by one pattern, no
unknown token, merges in the order of their ids. Then every token of the vocabulary and a set of difficult texts must
give the same ids. This is strong evidence, not a proof for all texts. Therefore one document of each batch is encoded
by both, and a batch that differs is encoded by Hugging Face.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from data_pipeline.untrusted import parse_json, read_file

GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

T = TypeVar("T")
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


def tiktoken_encoder(file: Path, encode: Encode) -> Encode | None:
    """A batch encoder through tiktoken that gives the ids of `encode`, the encoder of the tokenizer in `file`.

    None if tiktoken is not installed or cannot give the same ids."""
    try:
        import tiktoken
    except ImportError:
        return None
    try:
        content = parse_json(read_file(file))
        pattern, ranks = _split_pattern(content), _mergeable_ranks(content)
        if pattern is None or ranks is None:
            return None
    except (ValueError, KeyError, TypeError, AttributeError):  # members that only Hugging Face's library can read
        return None
    encoding = _or_none(lambda: tiktoken.Encoding(file.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}))
    if encoding is None:
        return None

    def try_batch(texts: Sequence[str]) -> list[list[int]] | None:
        return _or_none(lambda: [encoding.encode_ordinary(text) for text in texts])

    words = [token.decode(errors="ignore") for token in ranks]
    probes = [*_PROBES, *words, *(f" {word}x" for word in words)]
    if try_batch(probes) != encode(probes):
        return None

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        ids = try_batch(texts)
        if ids is None or (texts and encode(texts[:1]) != ids[:1]):
            return encode(texts)
        return ids

    return encode_batch


def _or_none(call: Callable[[], T]) -> T | None:
    """The result of a call of tiktoken; None if it fails. A pattern or ids that it cannot use may make it panic, which
    is no Exception."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return None


def _split_pattern(content: dict[str, Any]) -> str | None:
    """The pattern that splits the text; None if the text is split in any other way."""
    pre_tokenizer = content["pre_tokenizer"]
    is_sequence = pre_tokenizer and pre_tokenizer["type"] == "Sequence"
    match pre_tokenizer["pretokenizers"] if is_sequence else [pre_tokenizer]:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
        case _:
            return None


def _mergeable_ranks(content: dict[str, Any]) -> dict[bytes, int] | None:
    """Bytes of each token -> id. None if ids do not follow the order of merges or the model has other features."""
    model = content["model"]
    features = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout", "byte_fallback")
    if content["normalizer"] is not None or model["type"] != "BPE" or any(model.get(name) for name in features):
        return None
    if not all(token["special"] for token in content["added_tokens"]):
        return None
    special = {token["content"] for token in content["added_tokens"]}
    byte_of = {letter: byte for byte, letter in letter_of_byte().items()}
    vocabulary = {token: number for token, number in model["vocab"].items() if token not in special}
    if any(letter not in byte_of for token in vocabulary for letter in token):
        return None
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    ids = [vocabulary.get("".join(merge), -1) for merge in merges]
    single = {token for token in vocabulary if len(token) == 1}
    if len(set(vocabulary.values())) != len(vocabulary):
        return None
    if ids != sorted(set(ids)) or -1 in ids or len(single) != 256 or len(single) + len(ids) != len(vocabulary):
        return None
    return {bytes(byte_of[letter] for letter in token): number for token, number in vocabulary.items()}


def letter_of_byte() -> dict[int, str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
