"""`keepstep checkpoint convert`: writes a checkpoint in the layout of another system, so that nobody is locked in.

Weights and the optimizer's state keep their bits. Beside them are the recipe and the tokenizer, so `keepstep checkpoint
import` reads the folder back.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from train.checkpoint.conversion.stored_tensors import StoredTensors
from train.checkpoint.format.verify import read_attachment
from train.checkpoint.importing.source import ADAM_STATE
from train.checkpoint.stores.protocol import Folder
from train.config import Recipe
from train.config_file import recipe_as_yaml
from train.errors import CheckpointError, ConfigError

MODEL, OPTIMIZER = "model.", "optim."


@dataclass(frozen=True)
class Written:
    """What a conversion wrote."""

    tensors: int
    left_out: list[str]
    """Names of tensors that the layout has no place for."""


def convert(source: Folder, kind: str, out: Path) -> Written:
    """Write the checkpoint to the new folder `out`, which appears only when it is complete. `kind`: a key of KINDS.

    ConfigError if `out` exists, CheckpointError if the checkpoint is damaged or has no weights."""
    if out.exists():
        raise ConfigError(f"{out} exists; name a new folder")
    stored = StoredTensors(source)
    if not any(name.startswith(MODEL) for name in stored.manifest.state_names):
        raise CheckpointError(f"{source} has no weights ({MODEL}*); name a checkpoint that Keepstep saved")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        written = _write(stored, kind, partial)
        _write_companions(stored, partial)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return written


def _write(stored: StoredTensors, kind: str, folder: Path) -> Written:
    names = sorted(stored.manifest.state_names)
    written: set[str] = set()
    match kind:
        case "dcp":
            from train.checkpoint.conversion import dcp

            theirs = {name: name for name in names if name.startswith(MODEL)}
            theirs |= {f"optimizer.state.{n.removeprefix(OPTIMIZER)}": n for n in names if n.startswith(OPTIMIZER)}
            dcp.write(stored, theirs, folder)
            written = set(theirs.values())
        case _:
            from train.checkpoint.conversion import universal

            parameters = {name.removeprefix(MODEL): {"fp32": name} for name in names if name.startswith(MODEL)}
            for name in names:
                parameter, _, state = name.removeprefix(OPTIMIZER).rpartition(".")
                if name.startswith(OPTIMIZER) and state in ADAM_STATE and parameter in parameters:
                    parameters[parameter][state] = name
            universal.write(stored, parameters, folder)
            written = {name for kinds in parameters.values() for name in kinds.values()}
    return Written(len(written), sorted(set(names) - written))


def _write_companions(stored: StoredTensors, folder: Path) -> None:
    """Write the tokenizer's files, and the recipe if the checkpoint has it."""
    for attachment in stored.manifest.attachments:
        (folder / attachment.plain_name).write_bytes(read_attachment(stored.folder, attachment))
    if stored.manifest.recipe is not None:
        recipe = Recipe.model_validate(stored.manifest.recipe)
        (folder / "recipe.yaml").write_text(recipe_as_yaml(recipe), encoding="utf-8")
