"""Reads tokenizer files of tiktoken: a line for each token, its bytes in base64 and its rank.

The file states neither the pattern that splits text nor the control tokens. Both are known for the families below; for
other files, `keepstep.json` beside the file states them as `pattern` and `end_of_document`. The result is a
`tokenizer.json` of Hugging Face that gives the same ids.
"""

import base64
import binascii
import json
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.tiktoken_encoder import GPT2_PATTERN, letter_of_byte
from data_pipeline.untrusted import open_file, read_file

SUFFIX = ".tiktoken"
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*\n")

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Family:
    """Tokenizers that split text alike."""

    tokens: int
    """Number of ranks in the file."""
    pattern: str
    control: dict[str, int]
    """Control tokens -> id. The first ends a document."""


_FAMILIES = (
    _Family(50_256, GPT2_PATTERN, {"<|endoftext|>": 50_256}),  # r50k, gpt2
    _Family(50_280, GPT2_PATTERN, {"<|endoftext|>": 50_256}),  # p50k, which has no rank 50256
    _Family(100_256, _CL100K, {"<|endoftext|>": 100_257}),
    _Family(199_998, _O200K, {"<|endoftext|>": 199_999}),
    _Family(151_643, _QWEN, {"<|endoftext|>": 151_643}),
    _Family(128_000, _CL100K, {"<|end_of_text|>": 128_001, "<|begin_of_text|>": 128_000}),  # Llama 3
)


def is_tiktoken(file: Path) -> bool:
    """Whether the file has the format of tiktoken, whatever its name."""
    with os.fdopen(open_file(file), "rb") as opened:
        return _LINE.match(opened.read(512)) is not None


def convert_tiktoken(file: Path, stated: dict[str, Any]) -> tuple[str, str]:
    """The text of an equal `tokenizer.json`, and the end-of-document token.

    `stated` may have `pattern`, `end_of_document` and `beginning_of_document`. DataError if the file is damaged, or if
    its pattern is unknown."""
    ranks = _read_ranks(file)
    family = next((family for family in _FAMILIES if family.tokens == len(ranks)), None)
    pattern = stated.get("pattern") or (family.pattern if family else None)
    if pattern is None:
        raise DataError(
            f"{file} has {len(ranks):,} tokens and states no pattern that splits text; write the pattern of its "
            f"tokenizer into {file.parent / 'keepstep.json'}: "
            f'{{"pattern": "REGEX", "end_of_document": "<|endoftext|>"}}'
        )
    control = dict(family.control) if family else {}
    end = stated.get("end_of_document") or next(iter(control), "<|endoftext|>")
    for name in (end, stated.get("beginning_of_document")):
        if name is not None and name not in control:
            control[name] = max(*ranks.values(), *control.values(), 0) + 1
    return json.dumps(_tokenizer_json(ranks, pattern, control), ensure_ascii=False), end


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Bytes of each token -> rank, in order of rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_file(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(
                f"{file}, line {number} is not a token in base64 and its rank; fetch the file again"
            ) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks):
        raise DataError(
            f"{file} has no token for byte {missing[0]}; fetch it again" if missing else f"{file} repeats a rank"
        )
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _tokenizer_json(ranks: dict[bytes, int], pattern: str, control: dict[str, int]) -> dict[str, Any]:
    letters = letter_of_byte()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    halves = [parts for token in ranks if len(parts := _parts(token, ranks)) == 2]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": name, **flags, "special": True}
            for name, number in sorted(control.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # as tiktoken: a word that is a token is not split
            "vocab": {spelled(token): rank for token, rank in ranks.items()} | control,
            "merges": [[spelled(part) for part in parts] for parts in halves],
        },
    }


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The tokens of lower rank that the token is merged from: two, if any merge leads to it."""
    limit = ranks[token]
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, limit), at) for at, (a, b) in enumerate(pairwise(parts))]
        rank, at = min(pairs)
        if rank >= limit:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
