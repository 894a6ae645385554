"""Reads the weights of a Keepstep checkpoint, or of a run's newest, so that a new run starts from them at step 0."""

from pathlib import Path

import torch

from train.checkpoint.format.manifest import MANIFEST, Manifest
from train.checkpoint.format.reader import Reader
from train.checkpoint.format.verify import read_attachment, read_manifest
from train.checkpoint.importing.config_json import Stated
from train.checkpoint.importing.source import Source
from train.checkpoint.stores.local import LocalFolder
from train.checkpoint.stores.steps import newest_step, step_name
from train.errors import CheckpointError
from train.model.config import ModelConfig

_PREFIX = "model."


def read(folder: Path) -> Source:
    """The weights, by this model's names, and the model that the checkpoint states.

    CheckpointError if there is no checkpoint or if it is damaged."""
    checkpoint, manifest = _newest(folder)
    try:
        reader = Reader(checkpoint)
        names = [name for name in reader.names() if name.startswith(_PREFIX)]
        weights = {name.removeprefix(_PREFIX): torch.from_numpy(reader[name]) for name in names}
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"the checkpoint {checkpoint} cannot be read: {error}; name an older one") from None
    place = LocalFolder(checkpoint)
    tokenizer = {attachment.plain_name: read_attachment(place, attachment) for attachment in manifest.attachments}
    return Source(weights=weights, stated=_stated(manifest), tokenizer=tokenizer)


def _stated(manifest: Manifest) -> Stated | None:
    """The model that the weights were trained with; None if the checkpoint does not state it."""
    section = (manifest.recipe or manifest.identity).get("model")
    if not section:
        return None
    model = ModelConfig.model_validate({"seq_len": 1, **section})  # an imported one does not state a length
    free = {"dropout", "init_std"} | ({"seq_len"} if model.positions == "rope" else set())
    settings = model.model_dump(exclude=free) | {"n_kv_heads": model.kv_heads, "d_ff": model.ff_width}
    return Stated(settings, trained_seq_len=section.get("seq_len"))


def _newest(folder: Path) -> tuple[Path, Manifest]:
    """The checkpoint at `folder`, or the newest one in the run folder or folder of checkpoints, and its manifest."""
    for checkpoints in (folder / "checkpoints", folder):
        if (step := newest_step(checkpoints)) is not None:
            folder = checkpoints / step_name(step)
            break
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no checkpoint of Keepstep; name a run folder (such as runs/laptop) or a step-N folder"
        )
    return folder, read_manifest(LocalFolder(folder))[0]
