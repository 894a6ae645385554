"""Finds the tokenizer that a user names: a local path, or a name on the Hugging Face hub."""

from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.agreement import check_agreement
from data_pipeline.tokenizers.tiktoken_file import SUFFIX, is_tiktoken
from data_pipeline.tokenizers.tokenizer import COMPANIONS, HUGGING_FACE_FILE, SENTENCEPIECE_FILE


def find_tokenizer(name: str | Path) -> Path:
    """The local folder or file of that name, or else the tokenizer of that name, downloaded from the Hugging Face hub.

    DataError if there is neither, or if the folder has two tokenizers that differ; then name one of the files."""
    path = Path(name) if Path(name).exists() or str(name).startswith((".", "/")) else _download(str(name))
    both = [path / SENTENCEPIECE_FILE, path / HUGGING_FACE_FILE]
    if all(file.is_file() for file in both) and not is_tiktoken(both[0]):
        check_agreement(*both)
    return path


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    patterns = [SENTENCEPIECE_FILE, HUGGING_FACE_FILE, f"*{SUFFIX}", *COMPANIONS]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # offline, unknown name, no access
        raise DataError(
            f"no tokenizer in {name}: no such path, and the hub answers: {str(error).splitlines()[0]}"
        ) from None
