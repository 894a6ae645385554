"""Tokenizers behind one small interface: SentencePiece, and whatever the `tokenizers` library loads.

Control tokens come only from the pipeline: the text "</s>" or "<|endoftext|>" in a document is encoded as text. The
folder of a tokenizer holds `tokenizer.model` (SentencePiece) or `tokenizer.json` (Hugging Face), and may hold
`keepstep.json`, which names the end-of-document token where the other files do not.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import xxhash

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.tiktoken_twin import Encode, tiktoken_twin

SENTENCEPIECE_FILE = "tokenizer.model"
HUGGING_FACE_FILE = "tokenizer.json"
KEEPSTEP_FILE = "keepstep.json"
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")

_SPACE = "\u2581"  # SentencePiece writes a space so, and reads this character back as a space


class Tokenizer(Protocol):
    vocab_size: int
    """The largest id plus one."""
    end_of_document: int

    def encode(self, text: str) -> list[int]:
        """Never emits control ids."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SentencePieceTokenizer:
    def __init__(self, file: Path, end_of_document: str | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._processor = SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise DataError(f"{file} is not a SentencePiece model: {error}") from None
        self.vocab_size = self._processor.vocab_size()
        if end_of_document is None:
            self.end_of_document = self._processor.eos_id()
        else:
            self.end_of_document = self._processor.piece_to_id(end_of_document)
        if self.end_of_document < 0 or not self._processor.is_control(self.end_of_document):
            raise DataError(
                f"{file} has no control token {end_of_document or 'for the end of a document (eos)'}; "
                f"name one with --end-of-document or train with one"
            )
        space_bytes = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        self._space_ids = space_bytes if all(self._processor.is_byte(i) for i in space_bytes) else None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._space_ids is None or not any(_SPACE in text for text in texts):
            return self._processor.encode(list(texts), num_threads=1)
        return [self._encode_with_space_mark(text) for text in texts]

    def _encode_with_space_mark(self, text: str) -> list[int]:
        assert self._space_ids is not None
        first, *others = self._processor.encode(text.split(_SPACE), num_threads=1)
        return first + [token for ids in others for token in (*self._space_ids, *ids)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    def __init__(self, file: Path, end_of_document: str) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one tokenizer per process scales; its threads do not
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{file} is not a tokenizer of Hugging Face: {error}") from None
        self._file = file
        self._twin: Encode | None = None
        self._sought_twin = False
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # as text
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        end = self._tokenizer.token_to_id(end_of_document)
        if end is None:
            raise DataError(f"{file} has no token {end_of_document!r}; name another with --end-of-document")
        self.end_of_document: int = end
        if end in self.encode(end_of_document):
            raise DataError(
                f"{file} does not mark {end_of_document!r} as special, so a document that contains it would be cut "
                f'there; set "special": true in its added_tokens or name another with --end-of-document'
            )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """By tiktoken, where that is the same."""
        if not self._sought_twin:
            self._sought_twin, self._twin = True, tiktoken_twin(self._file, self._encode_batch)
        return self._twin(texts) if self._twin is not None else self._encode_batch(texts)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(path: str | Path, end_of_document: str | None = None) -> Tokenizer:
    """A folder with a tokenizer's files, or its `.model` or `.json` file. DataError if there is none."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    end_of_document = end_of_document or _stated_end_of_document(folder)
    for name in (SENTENCEPIECE_FILE, HUGGING_FACE_FILE) if path.is_dir() else (path.name,):
        file = folder / name
        if not file.is_file():
            continue
        if file.suffix == ".model":
            return SentencePieceTokenizer(file, end_of_document)
        if end_of_document is None:
            raise DataError(
                f"{folder} does not say which token ends a document (eos_token in tokenizer_config.json); "
                f'name it, for example --end-of-document "<|endoftext|>"'
            )
        return HuggingFaceTokenizer(file, end_of_document)
    raise DataError(
        f"no tokenizer in {path}: expected a folder with {SENTENCEPIECE_FILE} or {HUGGING_FACE_FILE}; "
        f"`keepstep data tokenizer` trains one"
    )


def _stated_end_of_document(folder: Path) -> str | None:
    for name in (KEEPSTEP_FILE, *_COMPANIONS[:2]):
        try:
            stated: dict[str, Any] = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        token = stated.get("end_of_document") or stated.get("eos_token")
        if token:
            return token["content"] if isinstance(token, dict) else token
    return None


def find_tokenizer(name: str | Path) -> Path:
    """The folder or file of that name, or else the files of that name on the Hugging Face hub, downloaded."""
    if Path(name).exists() or str(name).startswith((".", "/")):
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=[SENTENCEPIECE_FILE, HUGGING_FACE_FILE, *_COMPANIONS]))
    except Exception as error:  # offline, no such name, no right to it
        raise DataError(
            f"no tokenizer in {name}: no such path, and the hub says: {str(error).splitlines()[0]}"
        ) from None


def tokenizer_files(path: str | Path, end_of_document: str | None = None) -> dict[str, bytes]:
    """The files that travel with a data set: name -> content, the name of the end-of-document token among them."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    names = [n for n in (SENTENCEPIECE_FILE, HUGGING_FACE_FILE, *_COMPANIONS) if (folder / n).is_file()]
    files = {name: (folder / name).read_bytes() for name in names}
    if path.is_file() and path.name not in files:
        files[SENTENCEPIECE_FILE if path.suffix == ".model" else HUGGING_FACE_FILE] = path.read_bytes()
    end_of_document = end_of_document or _stated_end_of_document(folder)
    if end_of_document is not None:
        files[KEEPSTEP_FILE] = json.dumps({"end_of_document": end_of_document}).encode() + b"\n"
    return files


def hashes(files: dict[str, bytes]) -> dict[str, str]:
    return {name: xxhash.xxh3_128_hexdigest(content) for name, content in sorted(files.items())}
