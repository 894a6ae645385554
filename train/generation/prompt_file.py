"""Continues the prompts of a file: JSON lines in, JSON lines out."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from data_pipeline.untrusted import in_one_line, parse_json, read_file
from train.errors import ConfigError
from train.generation.complete import Request, complete
from train.generation.open_model import Opened

MAX_BYTES = 1 << 28
"""Size of a file of prompts, at most."""


@dataclass(frozen=True)
class Prompt:
    """One line of a file of prompts."""

    text: str
    fields: dict[str, Any]
    """All members of the line. The line of the result has them too."""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file with an object on each line, such as `{"prompt": "def "}`. ConfigError if it has others."""
    try:
        lines = read_file(path, limit=MAX_BYTES).split(b"\n")
    except OSError as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {in_one_line(error)}; name a JSON lines file") from None
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f'--prompts: {path} has no prompts; write one object on each line, {{"prompt": "..."}}')
    return prompts


def _prompt(line: bytes, place: str) -> Prompt:
    try:
        fields: Any = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"--prompts: {place} is not JSON: {in_one_line(error)}; correct the line") from None
    text = cast(dict[str, Any], fields).get("prompt") if isinstance(fields, dict) else None
    if not isinstance(text, str) or not text:
        raise ConfigError(f'--prompts: {place} has no text "prompt"; a line is an object such as {{"prompt": "..."}}')
    return Prompt(text, fields)


def continue_prompts(
    opened: Opened, prompts: list[Prompt], request: Request, batch_size: int, advance: Callable[[float], None]
) -> Iterator[str]:
    """The line of each result, in the order of the prompts, which are continued `batch_size` at a time.

    `request` has the settings, and one seed, that of every prompt. `advance` gets the number of texts that ended."""
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        texts = [prompt.text for prompt in batch]
        completion = complete(opened, replace(request, prompts=texts, seeds=[*request.seeds] * len(batch)))
        for _ in completion.steps:
            pass
        for prompt, row in zip(batch, completion.rows, strict=True):
            result = {"text": row.text, "finish": row.finish, "tokens": row.tokens}
            yield json.dumps(prompt.fields | result, ensure_ascii=False) + "\n"
        advance(len(batch))


def write_results(lines: Iterator[str], out: Path) -> None:
    """Write the lines to the new file `out`, which appears only when it is complete."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        partial.rename(out)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
