"""Compares the two tokenizers of a folder that has both files."""

from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.untrusted import read_file

_TEXTS = ("Hello, world!", " two  spaces\n\tand 12345 caf\u00e9 \u4e2d\u6587 \U0001f600", "the cat's <s> </s> end\r\n")


def check_agreement(sentencepiece_file: Path, hugging_face_file: Path) -> None:
    """DataError if the two files give other ids for a text, or other tokens for an id."""
    difference = _difference(sentencepiece_file, hugging_face_file)
    if difference is not None:
        raise DataError(
            f"{sentencepiece_file} and {hugging_face_file.name} beside it are different tokenizers: {difference}; name "
            f"the one to use, such as --tokenizer {hugging_face_file}"
        )


def _difference(sentencepiece_file: Path, hugging_face_file: Path) -> str | None:
    import tokenizers
    from sentencepiece import SentencePieceProcessor

    try:
        pieces = SentencePieceProcessor(model_proto=read_file(sentencepiece_file))
        other = tokenizers.Tokenizer.from_str(read_file(hugging_face_file).decode())
    except Exception as error:  # `tokenizers` raises plain Exception
        return f"one cannot be read ({error})"
    size, other_size = pieces.vocab_size(), max(other.get_vocab(with_added_tokens=True).values()) + 1
    if size != other_size:
        return f"{size} and {other_size} tokens"
    for number in range(size):
        if pieces.id_to_piece(number) != other.id_to_token(number):
            return f"token {number} is {pieces.id_to_piece(number)!r} and {other.id_to_token(number)!r}"
    other.encode_special_tokens = True
    for text in _TEXTS:
        ids, other_ids = pieces.encode(text), other.encode(text, add_special_tokens=False).ids
        if ids != other_ids:
            return f"the text {text!r} has the ids {ids[:8]} and {other_ids[:8]}"
    return None
