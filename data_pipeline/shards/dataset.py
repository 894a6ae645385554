"""An opened data set: its manifest, its tokenizer and the storages from which it is read."""

import json
import tempfile
from pathlib import Path

import xxhash

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import FILES, NAME, Manifest, parse_manifest
from data_pipeline.shards.storage import LocalStorage, Span, open_storage, read_checked
from data_pipeline.tokenizers.tokenizer import Tokenizer, load_tokenizer


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

    def tokenizer_dir(self) -> Path:
        """A local folder with the tokenizer's files, verified. DataError if one is damaged."""
        contents = {name: self._read(f"tokenizer/{name}") for name in self.manifest.tokenizer}
        for name, content in contents.items():
            if xxhash.xxh3_128_hexdigest(content) != self.manifest.tokenizer[name]:
                raise DataError(f"{self.address}/tokenizer/{name} is damaged; restore it from a copy of the data set")
        if isinstance(self.storages[0], LocalStorage):
            return Path(self.address) / "tokenizer"
        if self._downloaded is None:
            self._downloaded = tempfile.TemporaryDirectory(prefix="keepstep-tokenizer-")
            for name, content in contents.items():
                (Path(self._downloaded.name) / name).write_bytes(content)
        return Path(self._downloaded.name)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the data set was built with."""
        return load_tokenizer(self.tokenizer_dir())

    def files(self) -> list[str]:
        """The addresses of the input files, by number."""
        return json.loads(self._read(FILES))

    def close(self) -> None:
        """Deletes the downloaded tokenizer, if there is one."""
        if self._downloaded is not None:
            self._downloaded.cleanup()
            self._downloaded = None
