"""Finds the newest good checkpoint that is of this run; `fill.py` reads it.

Rank 0 alone looks at the folder and tells the others: on a network file system ranks may see different things. A
checkpoint that is damaged is moved aside, by name and with the reason, and the one before is tried. A checkpoint of
another run is an error, and so is a folder with nothing but damaged ones: a run never starts from zero by accident.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from parallel.engine import CheckpointTensor
from train.checkpoint.format.dtypes import DTYPE_NAMES
from train.checkpoint.format.manifest import DamagedError, Manifest, decode, flat
from train.checkpoint.format.verify import read_manifest
from train.checkpoint.group import Group
from train.checkpoint.saved_state import Loaded, Wanted
from train.checkpoint.stores.protocol import Root
from train.errors import CheckpointError

log = logging.getLogger(__name__)

_OPTIONAL = "scaler."
"""fp16's loss scale: there only in fp16, and another precision is no other run."""
_SHOWN = 5


def load_newest(root: Root, group: Group, wanted: Wanted, load_local: Callable[[int], Loaded | None]) -> Loaded | None:
    """See `CheckpointManager.load_newest`. `load_local(step)` tries the fast tier, not below that step. Collective."""
    skipped: dict[int, str] = {}

    def quarantine(step: int, error: DamagedError) -> None:
        where = _quarantine(root, step)
        skipped[step] = f"{root.folder(step)}: {error}"
        wanted.record("quarantined", step=step, error=str(error), path=where)
        log.error("checkpoint of step %d is damaged and was set aside as %s: %s", step, where, error)

    while True:
        newest = group.on_rank0(lambda: max(set(root.steps()) - set(skipped), default=0))
        if (loaded := load_local(newest)) is not None:
            return loaded
        if (found := group.on_rank0(lambda: _newest(root, skipped, quarantine))) is None:
            return None

        from train.checkpoint.fill import fill  # imports DCP, which takes half a second: only where it is needed

        step, manifest = found[0], decode(found[1])
        check(group, manifest, wanted)
        try:
            return fill(root.folder(step), group, manifest, wanted)
        except DamagedError as error:
            group.on_rank0(partial(quarantine, step, error))


def _newest(
    root: Root, skipped: Mapping[int, str], quarantine: Callable[[int, DamagedError], None]
) -> tuple[int, bytes] | None:
    """The newest checkpoint whose manifest is intact. Rank 0 alone."""
    root.sweep()
    for step in reversed(root.steps()):
        if step in skipped:
            continue
        try:
            return step, read_manifest(root.folder(step))[1]
        except DamagedError as error:
            quarantine(step, error)
    damaged = list(skipped.values()) or root.quarantined()
    if damaged:
        raise CheckpointError(
            "no good checkpoint is left, and the run will not silently start from zero; remove the damaged ones to "
            f"start anew: {'; '.join(damaged)}"
        )
    return None


def _quarantine(root: Root, step: int) -> str:
    try:
        return root.quarantine(step)
    except OSError:  # a read-only folder, say: then it is only skipped
        return str(root.folder(step))


def check(group: Group, manifest: Manifest, wanted: Wanted) -> None:
    """CheckpointError on every rank unless the checkpoint is of this run and this model. Collective."""
    group.on_rank0(partial(check_identity, manifest, wanted))
    group.gather(partial(check_tensors, manifest, wanted.state))


def check_identity(manifest: Manifest, wanted: Wanted) -> None:
    """CheckpointError that lists the facts that differ, except the allowed ones (by dotted name or section)."""
    if not manifest.identity:  # imported from elsewhere: only its tensors can be compared
        return
    theirs, ours = flat(manifest.identity), flat(wanted.identity)
    differing = {}
    for name in sorted(theirs.keys() | ours.keys()):
        old, new = theirs.get(name), ours.get(name)
        if old != new:
            if any(name == allowed or name.startswith(f"{allowed}.") for allowed in wanted.allow):
                wanted.record("allowed_difference", name=name, checkpoint=old, run=new)
            else:
                differing[name] = f"{name}: {old!r} in the checkpoint, {new!r} in this run"
    if list(differing) == ["model.vocab_size"]:
        raise _other_padding(theirs["model.vocab_size"], ours["model.vocab_size"])
    if differing:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} is of another run: {'; '.join(differing.values())}. Use another "
            "run name or the recipe of the checkpoint, or say what may differ (--allow schedule, --allow data_weights)"
        )


def check_tensors(manifest: Manifest, state: Mapping[str, CheckpointTensor]) -> None:
    """CheckpointError unless checkpoint and state have the same names, shapes and types."""
    missing = sorted(name for name in state.keys() - manifest.state_names if not name.startswith(_OPTIONAL))
    unexpected = sorted(name for name in manifest.state_names - state.keys() if not name.startswith(_OPTIONAL))
    if missing or unexpected:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} has other tensors than the model and its optimizer: "
            f"{len(missing)} missing{_first(missing)}, {len(unexpected)} unexpected{_first(unexpected)}"
        )
    wrong: list[str] = []
    rows = set()
    for name in sorted(state.keys() & manifest.state_names):
        saved, tensor = manifest.pieces[name][0], state[name]
        shape = tuple(tensor.shape)
        if saved.shape != shape or saved.dtype != DTYPE_NAMES[tensor.dtype]:
            wrong.append(f"{name}: {saved.dtype} {saved.shape} saved, {DTYPE_NAMES[tensor.dtype]} {shape} wanted")
            rows.add((saved.shape[:1], shape[:1], saved.shape[1:] == shape[1:] and saved.shape != shape))
    if not wrong:
        return
    if len(rows) == 1 and (pair := rows.pop())[2] and any("embed" in name or "head" in name for name in wrong):
        raise _other_padding(pair[0][0], pair[1][0])
    raise CheckpointError(f"{len(wrong)} tensors of another shape or type{_first(wrong)}")


def _other_padding(saved: int, wanted: int) -> CheckpointError:
    return CheckpointError(
        f"the vocabulary is padded to another size: {saved} rows saved, {wanted} in the model; "
        f"set model.vocab_size to {saved}"
    )


def _first(names: list[str]) -> str:
    if not names:
        return ""
    return f" ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
