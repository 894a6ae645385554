"""Tokenizers behind one small interface: SentencePiece, and any tokenizer that the `tokenizers` library loads.

Only the pipeline adds control tokens: the text "</s>" or "<|endoftext|>" in a document is encoded as text. The folder
of a tokenizer contains `tokenizer.model` (SentencePiece) or `tokenizer.json` (Hugging Face). It may contain
`keepstep.json`, which names the tokens that begin and end a document if the other files do not.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, cast

import xxhash

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.tiktoken_encoder import Encode, tiktoken_encoder
from data_pipeline.tokenizers.tiktoken_file import SUFFIX, convert_tiktoken, is_tiktoken
from data_pipeline.untrusted import in_one_line, parse_json, read_file

SENTENCEPIECE_FILE = "tokenizer.model"
HUGGING_FACE_FILE = "tokenizer.json"
KEEPSTEP_FILE = "keepstep.json"
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
TOKENIZER_FILES = (SENTENCEPIECE_FILE, HUGGING_FACE_FILE, KEEPSTEP_FILE, *COMPANIONS)
"""Names of the files that a data set stores as its tokenizer."""

_SPACE = "\u2581"  # SentencePiece's mark for a space; it decodes this character to a space


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    vocab_size: int
    """The largest id plus one."""
    end_of_document: int
    """Id of the control token that the pipeline puts after each document."""
    beginning_of_document: int | None
    """Id of the control token that the pipeline puts before each document; None: nothing."""
    unknown: int | None
    """Id of the token for text that the tokenizer cannot represent; None if there is none."""

    def encode(self, text: str) -> list[int]:
        """The ids of the text, control ids never among them."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; the same ids as from `encode`, but faster."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""
        ...

    def normalize(self, text: str) -> str:
        """The text as the model gets it: what the normalizer changes is meant to be lost."""
        ...


class SentencePieceTokenizer:
    """A SentencePiece model. Lossless: U+2581 in a text, SentencePiece's mark for a space, is encoded as bytes."""

    def __init__(
        self, file: Path, end_of_document: str | None = None, beginning_of_document: str | None = None
    ) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._processor = SentencePieceProcessor(model_proto=read_file(file))
            for number in range(self._processor.vocab_size()):
                self._processor.id_to_piece(number)  # a damaged file may have pieces that are not UTF-8
        except (RuntimeError, OSError, ValueError, IndexError) as error:
            raise DataError(f"{file} is not a SentencePiece model: {in_one_line(error)}") from None
        self.vocab_size = self._processor.vocab_size()
        if end_of_document is None:
            self.end_of_document = self._processor.eos_id()
        else:
            self.end_of_document = self._processor.piece_to_id(end_of_document)
        if self.end_of_document < 0 or not self._processor.is_control(self.end_of_document):
            raise DataError(
                f"{file} has no control token {end_of_document or 'for the end of a document (eos)'}; "
                f"name one with --end-of-document, or train the model with one"
            )
        begin = beginning_of_document
        self.beginning_of_document: int | None = None if begin is None else self._processor.piece_to_id(begin)
        if self.beginning_of_document is not None and not self._processor.is_control(self.beginning_of_document):
            raise DataError(f"{file} has no control token {begin}; name another with --beginning-of-document")
        self.unknown: int | None = self._processor.unk_id() if self._processor.unk_id() >= 0 else None
        space_bytes = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        self._space_ids = space_bytes if all(self._processor.is_byte(i) for i in space_bytes) else None

    def encode(self, text: str) -> list[int]:
        """The ids of the text, control ids never among them."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        if self._space_ids is None or not any(_SPACE in text for text in texts):
            return self._processor.encode(list(texts), num_threads=1)
        return [self._encode_with_space_mark(text) for text in texts]

    def _encode_with_space_mark(self, text: str) -> list[int]:
        assert self._space_ids is not None
        first, *others = self._processor.encode(text.split(_SPACE), num_threads=1)
        return first + [token for ids in others for token in (*self._space_ids, *ids)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; control tokens give no text."""
        return self._processor.decode([int(i) for i in ids])

    def normalize(self, text: str) -> str:
        """The text as the model gets it."""
        return self._processor.normalize(text)


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library. Batches are encoded by tiktoken if it gives the same ids."""

    def __init__(self, file: Path, end_of_document: str, beginning_of_document: str | None = None) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per CPU scales better than threads
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(read_file(file).decode())
            self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises plain Exception, and panics, which are no Exception
            raise DataError(f"{file} is not a Hugging Face tokenizer: {in_one_line(error)}") from None
        self._file = file
        self._tiktoken: Encode | None = None
        self._tried_tiktoken = False
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # encodes "<|endoftext|>" in a document as text
        if self._tokenizer.decoder is None and "ByteLevel" in str(self._tokenizer.pre_tokenizer):
            self._tokenizer.decoder = tokenizers.decoders.ByteLevel()  # some files leave it out
        self.end_of_document: int = self._control_id(end_of_document, "end")
        begin = beginning_of_document
        self.beginning_of_document: int | None = None if begin is None else self._control_id(begin, "beginning")
        self.unknown: int | None = self._unknown()

    def _unknown(self) -> int | None:
        import tokenizers

        model = self._tokenizer.model
        if isinstance(model, tokenizers.models.Unigram):  # has no such attribute
            return json.loads(self._tokenizer.to_str())["model"].get("unk_id")
        token = getattr(model, "unk_token", None)
        return None if token is None else self._tokenizer.token_to_id(token)

    def _control_id(self, token: str, which: str) -> int:
        """The id of the token. DataError if there is none, or if text can spell it."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise DataError(f"{self._file} has no token {token!r}; name another with --{which}-of-document")
        if found in self.encode(token):
            raise DataError(
                f"{self._file} does not mark {token!r} as special, so a document that contains it would be cut "
                f'there; set "special": true in its added_tokens or name another with --{which}-of-document'
            )
        return found

    def encode(self, text: str) -> list[int]:
        """The ids of the text, control ids never among them."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        if not self._tried_tiktoken:
            self._tried_tiktoken, self._tiktoken = True, tiktoken_encoder(self._file, self._encode_batch)
        return self._tiktoken(texts) if self._tiktoken is not None else self._encode_batch(texts)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def normalize(self, text: str) -> str:
        """The text as the model gets it."""
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)


def load_tokenizer(
    path: str | Path, end_of_document: str | None = None, beginning_of_document: str | None = None
) -> Tokenizer:
    """The tokenizer at `path`: a folder with its files, or its `.model`, `.json` or `.tiktoken` file.

    DataError if there is none, or if a control token is unknown or not a control token."""
    file = _tokenizer_file(Path(path))
    stated = _stated(file.parent, end_of_document, beginning_of_document)
    begin, end = stated.get("beginning_of_document"), stated.get("end_of_document")
    if is_tiktoken(file):
        with TemporaryDirectory(prefix="keepstep-tokenizer-") as folder:
            converted = Path(folder) / HUGGING_FACE_FILE
            content, end = convert_tiktoken(file, stated)
            converted.write_text(content, encoding="utf-8")
            loaded = HuggingFaceTokenizer(converted, end, begin)
            loaded.encode_batch([""])  # its first batch reads the file again
            return loaded
    if file.suffix == ".model":
        return SentencePieceTokenizer(file, end, begin)
    if end is None:
        raise DataError(
            f"{file.parent} does not state which token ends a document (eos_token in tokenizer_config.json); "
            f'name it, for example --end-of-document "<|endoftext|>"'
        )
    return HuggingFaceTokenizer(file, end, begin)


def _tokenizer_file(path: Path) -> Path:
    """The tokenizer's file: `path`, or the first of those known in the folder `path`. DataError if there is none."""
    if path.exists() and not path.is_dir() and not path.is_file():
        raise DataError(f"{path} is a FIFO, a socket or a device; name the folder or the file of a tokenizer")
    names = (SENTENCEPIECE_FILE, HUGGING_FACE_FILE, *sorted(found.name for found in path.glob(f"*{SUFFIX}")))
    found = [path] if path.is_file() else [path / name for name in names if (path / name).is_file()]
    if not found:
        raise DataError(
            f"no tokenizer in {path}: expected a folder with {SENTENCEPIECE_FILE} or {HUGGING_FACE_FILE}, or a "
            f"{SUFFIX} file; `keepstep data tokenizer` trains one"
        )
    return found[0]


def _stated(folder: Path, end_of_document: str | None, beginning_of_document: str | None) -> dict[str, Any]:
    """The control tokens of documents, as given or else as the tokenizer's files name them, and the other entries of
    `keepstep.json`."""
    stated = _read_json(folder / KEEPSTEP_FILE)
    given = {"end_of_document": end_of_document, "beginning_of_document": beginning_of_document}
    stated |= {name: token for name, token in given.items() if token is not None}
    for companion in COMPANIONS[:2]:
        if not stated.get("end_of_document") and (token := _read_json(folder / companion).get("eos_token")):
            stated["end_of_document"] = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
    for name in ("end_of_document", "beginning_of_document", "pattern"):
        if stated.get(name) is not None and not isinstance(stated[name], str):
            raise DataError(f"the tokenizer in {folder} states {name} {str(stated[name])[:100]!r}, which is no text")
    return stated


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file. DataError if it is anything else."""
    if not file.is_file():
        return {}
    try:
        content = parse_json(_content(file))
        if not isinstance(content, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise DataError(f"{file} cannot be read: {in_one_line(error)}; fetch the tokenizer again") from None
    return cast(dict[str, Any], content)


def _content(file: Path) -> bytes:
    """The content of a tokenizer's file. DataError if it cannot be read."""
    try:
        return read_file(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {in_one_line(error)}; fetch the tokenizer again") from None


def tokenizer_files(
    path: str | Path, end_of_document: str | None = None, beginning_of_document: str | None = None
) -> dict[str, bytes]:
    """The tokenizer's files, which a data set stores: name -> content. They name the control tokens of documents."""
    path = Path(path)
    file = _tokenizer_file(path)
    both = [file.parent / name for name in (SENTENCEPIECE_FILE, HUGGING_FACE_FILE)]
    has_both = path.is_dir() and all(other.is_file() for other in both)
    stated = _stated(file.parent, end_of_document, beginning_of_document)
    companions = [file.parent / name for name in COMPANIONS if (file.parent / name).is_file()]
    files = {found.name: _content(found) for found in companions}
    if is_tiktoken(file):
        content, stated["end_of_document"] = convert_tiktoken(file, stated)
        files[HUGGING_FACE_FILE] = content.encode()
    elif has_both:
        files |= {other.name: _content(other) for other in both}
    else:
        files[SENTENCEPIECE_FILE if file.suffix == ".model" else HUGGING_FACE_FILE] = _content(file)
    named = ("end_of_document", "beginning_of_document")
    if control := {name: stated[name] for name in named if stated.get(name) is not None}:
        files[KEEPSTEP_FILE] = json.dumps(control).encode() + b"\n"
    return files


def hashes(files: dict[str, bytes]) -> dict[str, str]:
    """The 128-bit xxh3 hash of each file, by name."""
    return {name: xxhash.xxh3_128_hexdigest(content) for name, content in sorted(files.items())}
