"""How many bytes of text each token stands for, so that losses per token become bits per byte.

Bits per byte compare models with different tokenizers. Control tokens stand for no text. The text is the one that the
model gets: after the tokenizer's normalizer.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from data_pipeline.tokenizers.tiktoken_encoder import letter_of_byte
from data_pipeline.tokenizers.tokenizer import HUGGING_FACE_FILE, SENTENCEPIECE_FILE, load_tokenizer
from data_pipeline.untrusted import parse_json, read_file

_SPACE = "\u2581"
_PROBES = ("Hello, world! 12345", "a b\n\tc  d", "na\u00efve \u4e2d\u6587 \U0001f600 \u00e9")


@cache
def bytes_of_tokens(tokenizer_dir: Path) -> NDArray[np.int64] | None:
    """Bytes of text by token id. Shape (vocabulary,).

    None if they are not known: the tokenizer is of another kind, or the bytes of texts do not add up."""
    tokenizer = load_tokenizer(tokenizer_dir)
    model, description = tokenizer_dir / SENTENCEPIECE_FILE, tokenizer_dir / HUGGING_FACE_FILE
    if model.is_file():
        sizes = _sizes_of_sentencepiece(model)
    else:
        sizes = _sizes_of_hugging_face(parse_json(read_file(description)))
    if sizes is None:
        return None
    table = np.zeros(tokenizer.vocab_size, np.int64)
    for number, size in sizes.items():
        table[number] = size
    table[[token for token in (tokenizer.end_of_document, tokenizer.beginning_of_document) if token is not None]] = 0
    for text in _PROBES:
        ids = tokenizer.encode(text)
        decoded, counted = len(tokenizer.decode(ids).encode()), int(table[ids].sum())
        if tokenizer.unknown not in ids and counted not in (decoded, decoded + 1):  # a space may be put before a text
            return None
    return table


def _sizes_of_sentencepiece(model: Path) -> dict[int, int]:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=read_file(model))
    sizes: dict[int, int] = {}
    for number in range(processor.vocab_size()):
        if processor.is_byte(number):
            sizes[number] = 1
        elif not (processor.is_control(number) or processor.is_unknown(number) or processor.is_unused(number)):
            sizes[number] = _text_bytes(processor.id_to_piece(number))
    return sizes


def _sizes_of_hugging_face(description: dict[str, Any]) -> dict[int, int] | None:
    """Bytes by token id, of a byte-level vocabulary or of one in SentencePiece's style; None for other kinds."""
    vocabulary = _vocabulary(description["model"]["vocab"])
    parts = json.dumps([description.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")])
    if '"ByteLevel"' in parts:
        letters = set(letter_of_byte().values())
        sizes = {number: len(token) for token, number in vocabulary.items() if letters.issuperset(token)}
    elif '"Metaspace"' in parts or json.dumps(_SPACE)[1:-1] in parts:
        sizes = {number: _text_bytes(token) for token, number in vocabulary.items()}
    else:
        return None
    for added in description.get("added_tokens") or ():
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return sizes


def _vocabulary(stated: Any) -> dict[str, int]:
    """Id by token. Unigram models list pairs of token and score, in order of id."""
    if isinstance(stated, list):
        return {pair[0]: number for number, pair in enumerate(cast(list[list[Any]], stated))}
    return cast(dict[str, int], stated)


def _text_bytes(piece: str) -> int:
    """Bytes of a piece of SentencePiece. A byte that has no piece of its own is written as `<0x0A>`."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace(_SPACE, " ").encode())
