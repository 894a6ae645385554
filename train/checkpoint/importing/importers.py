"""`keepstep checkpoint import`: converts a checkpoint of another system to one from which a run starts.

`kinds.py` lists what can be read. The new checkpoint has the source's step, or step 0. Its tokens, and with them the
position in the data, are those of the recipe's batches up to this step. One process holds the whole model: weights and
optimizer state, 12 bytes per parameter under AdamW.
"""

import pickle
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from data_pipeline.untrusted import UnsafeNameError, in_one_line
from train.checkpoint.importing.config_json import CONFIG, check_stated, read_stated
from train.checkpoint.importing.convert import Converted, convert
from train.checkpoint.importing.kinds import KINDS
from train.checkpoint.importing.names import Layout, Rope, layout_of
from train.checkpoint.importing.new_recipe import recipe_for, write_recipe
from train.checkpoint.importing.source import Source
from train.checkpoint.importing.target import check_steps, places
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.stores.steps import step_name
from train.config import CheckpointConfig, GuardConfig, Recipe
from train.config_file import load_recipe
from train.errors import CheckpointError
from train.export.carried_tokenizer import Carried, carried_tokenizer
from train.health.guard import Guard
from train.run_folder import RunFolder

RECIPE = "recipe.yaml"
_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, ArithmeticError, MemoryError,
    AssertionError, pickle.UnpicklingError, SafetensorError, UnsafeNameError, CheckpointException,
)  # fmt: skip
"""What libraries raise for files that are damaged or of another kind."""


@dataclass(frozen=True)
class Request:
    """What the command asks for."""

    kind: str
    """A key of KINDS."""
    source: Path
    """Folder of the other system's checkpoint."""
    recipe: str | None
    """Path of the recipe with the same model; None writes one from the source's config.json."""
    target: str
    """Run folder or its folder of checkpoints, as a path or URL."""
    trust: bool = False
    """Whether files may be unpickled."""
    rope: Rope = "auto"
    check: bool = False
    """Whether to compare logits with transformers before anything is saved."""


@dataclass(frozen=True)
class Imported:
    """An imported checkpoint."""

    path: str
    step: int
    notes: list[str] = field(default_factory=list)
    """What the user should know: sentences."""


def import_checkpoint(request: Request) -> Imported:
    """Convert the checkpoint and save it. Nothing is saved if it raises.

    CheckpointError if the source needs `trust`, if it is not the recipe's model, or if the target has a checkpoint of
    this step or a later one."""
    if not request.source.is_dir():
        raise CheckpointError(f"{request.source} is not a folder; name the folder of the checkpoint to import")
    if KINDS[request.kind].unpickles and not request.trust:
        raise CheckpointError(
            f"a {request.kind} checkpoint has to be unpickled, which can run any code that its author put there; "
            "add --trust if you know where it comes from"
        )
    checkpoints, run = places(request.target)
    location = str(request.source)
    notes: list[str] = []
    given = _given_recipe(request, run)
    source = read_source(request.kind, request.source)
    config = given or recipe_for(source.stated, run or Path(request.target), location)
    if source.stated is not None:
        check_stated(source.stated, config.model, location)
    check_steps(checkpoints, run, config, source.step)
    if source.optimizer and not source.optimizer.get("step"):  # moments are only right with their step
        source.optimizer.clear()
        notes.append("the source has moments but no step: the optimizer and the schedule start anew, at step 0")
    layout = layout_of(source.weights, config.model, request.rope)
    converted = convert(source, layout, config, location)
    notes += _notes(source, layout, config, converted)
    if request.check:
        notes.append(_checked(request, converted.state, config))
    tokenizer = carried_tokenizer(source.tokenizer, request.source, config.model.vocab_size, notes)
    path = _save(converted.state, source, config, checkpoints, request, tokenizer)
    if run is not None:
        if not (run / RECIPE).exists():
            write_recipe(config, run / RECIPE, location, written=request.recipe is None)
        notes.append(f"to train it: {_command(request, config, run)}")
    return Imported(path, source.step, notes)


def _given_recipe(request: Request, run: Path | None) -> Recipe | None:
    """The recipe that the user names; None if one can be written to the run folder, else CheckpointError."""
    if request.recipe is not None:
        return load_recipe(request.recipe)
    if run is None or (run / RECIPE).exists():
        why = "is not a local run folder" if run is None else f"has a {RECIPE} already"
        raise CheckpointError(
            f"{request.target} {why}, so no recipe is written there; give a recipe: SOURCE RECIPE RUN"
        )
    return None


def read_source(kind: str, folder: Path) -> Source:
    """A folder as the reader of its kind (a key of KINDS) returns it. CheckpointError if it cannot be read."""
    reader = import_module(KINDS[kind].reader)
    try:
        source: Source = reader.read(folder)
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{folder} cannot be read as a {kind} checkpoint: {in_one_line(error)}; it may be incomplete or of another "
            "kind (--from)"
        ) from error
    if not source.weights:
        raise CheckpointError(f"{folder} has no weights that a {kind} checkpoint would have")
    if source.stated is None:
        source.stated = read_stated(folder)
    return source


def _command(request: Request, recipe: Recipe, run: Path) -> str:
    """The command that trains the imported checkpoint, and not a run of another folder."""
    parts = ["keepstep run", request.recipe or str(run / RECIPE)]
    if RunFolder.of(recipe).root.absolute() != run:
        parts += [f"name={run.name}", f"runs_dir={run.parent}"]
    if request.recipe is None:
        parts.append("data.sources.0.path=DATA")
    return " ".join(parts)


def _notes(source: Source, layout: Layout, recipe: Recipe, converted: Converted) -> list[str]:
    """What the user should know about the import, besides that it succeeded."""
    notes: list[str] = []
    if source.stated is None:
        notes.append(
            f"the source has no {CONFIG}: names and shapes fit, but n_heads, rope_theta, norm_eps and the like are "
            "taken from the recipe unchecked"
        )
    if layout.style == "torchtitan":
        model, pairs = ("Llama", "neighbours") if layout.neighbours else ("Qwen3", "halves")
        notes.append(f"RoPE's pairs are taken to be {pairs}, as in torchtitan's {model} (--rope)")
    if source.optimizer and converted.restored < converted.parameters:
        anew = converted.parameters - converted.restored
        notes.append(
            f"the optimizer state of {anew} of {converted.parameters} parameters is missing or another: it starts anew"
        )
    if source.step >= recipe.train.steps:
        notes.append(
            f"the source has step {source.step}, and the recipe ends at train.steps {recipe.train.steps}: raise it"
        )
    return notes


def _checked(request: Request, state: dict[str, Tensor], recipe: Recipe) -> str:
    """Compare logits with transformers; returns a sentence with the result."""
    if read_stated(request.source) is None:
        raise CheckpointError(
            f"--check compares with transformers, which cannot load {request.source} without {CONFIG}; leave it out"
        )
    from train.checkpoint.importing.check_logits import check_logits  # transformers takes seconds to import

    return (
        f"logits agree with transformers: relative difference {check_logits(request.source, state, recipe.model):.2g}"
    )


def _save(
    state: dict[str, Tensor], source: Source, recipe: Recipe, target: str, request: Request, tokenizer: Carried
) -> str:
    """Save the state as a checkpoint of the source's step; returns its location."""
    step = source.step
    imported = {"kind": request.kind, "source": str(request.source.resolve()), "tokenizer": tokenizer.ids_hash}
    events: list[tuple[str, dict[str, Any]]] = []
    manager = CheckpointManager(
        target,
        CheckpointConfig(background=False, keep_last=2**31),
        {"model": identity_of(recipe)},
        lambda kind, **facts: events.append((kind, facts)),
        recipe=recipe.model_dump(mode="json"),
        attachments=tokenizer.files,
    )
    tokens = recipe.batch_sizes.first_sample(step) * recipe.model.seq_len
    extra = {"skipped": 0, "guard": Guard(GuardConfig()).state(), "imported": imported}
    manager.save(SavedProgress(step, tokens, extra=extra), state, {})
    manager.close()
    if events[-1][0] != "saved":
        raise CheckpointError(f"the imported checkpoint could not be saved: {events[-1][1]['error']}")
    return f"{target}/{step_name(step)}"


def identity_of(recipe: Recipe) -> dict[str, Any]:
    """The settings of the model that a run from the imported checkpoint must have.

    Under RoPE the length of sequences is free: no weight depends on it."""
    free = {"dropout", "init_std"} | ({"seq_len"} if recipe.model.positions == "rope" else set())
    return recipe.model.model_dump(mode="json", exclude=free)
