"""An opened data set: its manifest, its tokenizer and the storages from which it is read."""

import tempfile
from pathlib import Path

import xxhash

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import FILES, NAME, Manifest
from data_pipeline.shards.manifest_file import parse_files, parse_manifest
from data_pipeline.shards.storage import LocalStorage, Span, open_storage, read_checked
from data_pipeline.tokenizers.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer
from data_pipeline.untrusted import safe_path


class DataSet:
    """A prepared data set at a local or remote address, with an optional mirror."""

    def __init__(self, address: str, mirror: str | None = None) -> None:
        """Reads the manifest. DataError if there is no data set, or the manifest is damaged."""
        self.address = address
        self.storages = [open_storage(where) for where in (address, mirror) if where is not None]
        self.manifest: Manifest = parse_manifest(self._read(NAME), address)
        self._downloaded: tempfile.TemporaryDirectory[str] | None = None

    def _read(self, file: str) -> bytes:
        local = isinstance(self.storages[0], LocalStorage) and len(self.storages) == 1
        if local and not (Path(self.address) / file).is_file():
            raise DataError(
                f"no data set in {self.address} (no {file}); check data.sources or build one with `keepstep data build`"
            )
        (answer,) = read_checked(self.storages, [Span(file)], lambda number, data: None)
        if isinstance(answer, DataError):
            raise answer
        return bytes(answer)

    def tokenizer_files(self) -> dict[str, bytes]:
        """The content of the tokenizer's files by name, verified. DataError if one is damaged."""
        contents = {name: self._read(f"tokenizer/{name}") for name in self.manifest.tokenizer}
        for name, content in contents.items():
            if xxhash.xxh3_128_hexdigest(content) != self.manifest.tokenizer[name]:
                raise DataError(f"{self.address}/tokenizer/{name} is damaged; restore it from a copy of the data set")
        return contents

    def tokenizer_dir(self) -> Path:
        """A local folder with the tokenizer's files, verified.

        DataError if one is damaged, or if the folder has another file that a tokenizer reads."""
        contents = self.tokenizer_files()
        if isinstance(self.storages[0], LocalStorage):
            folder = Path(self.address) / "tokenizer"
            for name in TOKENIZER_FILES:
                if name not in contents and (folder / name).exists():
                    raise DataError(f"{folder / name} is not in the manifest; remove it, or build the data set again")
            return folder
        if self._downloaded is None:
            self._downloaded = tempfile.TemporaryDirectory(prefix="keepstep-tokenizer-")
            for name, content in contents.items():
                safe_path(Path(self._downloaded.name), name, TOKENIZER_FILES).write_bytes(content)
        return Path(self._downloaded.name)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the data set was built with. DataError if it is not the one that the manifest states."""
        loaded, manifest = load_tokenizer(self.tokenizer_dir()), self.manifest
        if (loaded.vocab_size, loaded.end_of_document) != (manifest.vocab_size, manifest.end_of_document):
            raise DataError(
                f"the tokenizer of {self.address} has {loaded.vocab_size} tokens and ends a document with "
                f"{loaded.end_of_document}, but the manifest states {manifest.vocab_size} and "
                f"{manifest.end_of_document}; restore the data set from a copy"
            )
        return loaded

    def files(self) -> list[str]:
        """The addresses of the input files, by number."""
        return parse_files(self._read(FILES), self.manifest, self.address)

    def close(self) -> None:
        """Deletes the downloaded tokenizer, if there is one."""
        if self._downloaded is not None:
            self._downloaded.cleanup()
            self._downloaded = None
