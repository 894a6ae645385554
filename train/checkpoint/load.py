"""Finds the newest good checkpoint of this run; `fill.py` reads it.

Only rank 0 looks at the folder and reports what it finds, because ranks may see different things on a network file
system. A damaged checkpoint is quarantined and the one before it is tried. A checkpoint of another run is an error. So
is a folder with nothing but damaged checkpoints: a run never restarts from step 0 by accident.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from parallel.engine import CheckpointTensor
from train.checkpoint.format.dtypes import DTYPE_NAMES
from train.checkpoint.format.manifest import DamagedError, Manifest, decode, flat
from train.checkpoint.format.verify import read_manifest
from train.checkpoint.group import Group
from train.checkpoint.saved_state import Loaded, LoadRequest
from train.checkpoint.stores.protocol import Root
from train.errors import CheckpointError
from train.model.config import ModelConfig
from train.optim.average import is_average
from train.optim.config import OptimConfig
from train.run_folder import MAY_DIFFER
from train.section import Section

log = logging.getLogger(__name__)

_SCALER = "scaler."
"""Prefix of the state of fp16's loss scaling. Only fp16 runs have it, and a run may change its precision."""
_SHOWN = 5
"""Names that an error message lists."""
_LISTED = 20
"""Checkpoints that an error message lists."""
NOTED = "noted"
"""Section of an identity whose differences are reported and need no permission."""
_OF_OURS, _OF_IMPORTED = {"model", "schedule", "data_weights"}, {"model"}
"""Sections of an identity that every checkpoint has that we saved, or imported."""
_NEW_SECTIONS = ("optimizer", "dropout", "seed", "batch_size", NOTED)
"""Sections that checkpoints of earlier versions lack. Where one is missing, nothing is known of it."""
_SETTINGS: dict[str, type[Section]] = {"model": ModelConfig, "schedule": OptimConfig, "optimizer": OptimConfig}
"""Where the settings of a section are declared, with their defaults."""


class FastTier(Protocol):
    """The fast tier, as far as a load needs it (`train.checkpoint.local_tier`, which imports DCP)."""

    unusable: list[str]
    """What the last load found and could not use, on any node. Equal on all ranks."""

    def load(self, request: LoadRequest, at_least: int) -> Loaded | None:
        """Fill the request from a checkpoint of this step or a later one; None if there is none. Collective."""
        ...


def load_newest(root: Root, group: Group, request: LoadRequest, tier: FastTier | None) -> Loaded | None:
    """Fill the request from the newest good checkpoint; see `CheckpointManager.load_newest`. Collective.

    A fill that fails leaves mixed tensors. So this returns only after a fill that completed, or if there was nothing
    to fill from on any tier."""
    skipped: dict[int, str] = {}

    def quarantine(step: int, error: DamagedError) -> None:
        path = _quarantine(root, step)
        skipped[step] = f"{root.folder(step)}: {error}"
        request.record("quarantined", step=step, error=str(error), path=path)
        log.error("the checkpoint of step %d is damaged and is now quarantined at %s: %s", step, path, error)

    while True:
        newest = group.on_rank0(lambda: max(set(root.steps()) - set(skipped), default=0))
        if tier is not None and (loaded := tier.load(request, newest)) is not None:
            return loaded
        if (found := group.on_rank0(lambda: _newest(root, skipped, quarantine))) is None:
            if tier is not None and tier.unusable:
                raise nothing_left(tier.unusable)
            return None

        from train.checkpoint.fill import fill  # imports DCP, which takes half a second; a new run does not need it

        step, manifest = found[0], decode(found[1])
        check_fits(group, manifest, request)
        try:
            return fill(root.folder(step), group, manifest, request)
        except DamagedError as error:
            group.on_rank0(partial(quarantine, step, error))


def _newest(
    root: Root, skipped: Mapping[int, str], quarantine: Callable[[int, DamagedError], None]
) -> tuple[int, bytes] | None:
    """Step and manifest of the newest checkpoint whose manifest is intact. Call on rank 0 only.

    CheckpointError if all checkpoints are damaged; None if there never was one."""
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
        raise nothing_left(damaged)
    return None


def nothing_left(unusable: Sequence[str]) -> CheckpointError:
    """The error if there are checkpoints, and none of them can be loaded."""
    more = f"; and {len(unusable) - _LISTED} more" if len(unusable) > _LISTED else ""
    return CheckpointError(
        "no good checkpoint is left, and a run does not restart from step 0 by itself; to start over, remove the "
        f"damaged checkpoints: {'; '.join(unusable[:_LISTED])}{more}"
    )


def _quarantine(root: Root, step: int) -> str:
    """Quarantine a checkpoint if the store permits it; returns its location."""
    try:
        return root.quarantine(step)
    except OSError:  # for example a read-only folder; then this load only skips the checkpoint
        return str(root.folder(step))


def check_fits(group: Group, manifest: Manifest, request: LoadRequest) -> None:
    """CheckpointError on every rank unless the checkpoint belongs to this run and this model. Collective."""
    group.on_rank0(partial(check_identity, manifest, request))
    group.gather(partial(check_tensors, manifest, request.state))


def check_identity(manifest: Manifest, request: LoadRequest) -> None:
    """CheckpointError that lists the facts that differ, unless `request.allow` has their name or section.

    Sections that every checkpoint has must be there: without them, nothing would be compared."""
    always = _OF_IMPORTED if "imported" in manifest.extra else _OF_OURS
    if missing := sorted(always & request.identity.keys() - manifest.identity.keys()):
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} does not state its {' and '.join(missing)}, so it may belong to "
            "any run; use a checkpoint that Keepstep saved"
        )
    differing: dict[str, tuple[Any, Any]] = {}
    for name, (old, new) in _differences(manifest, request.identity).items():
        if name.startswith(f"{NOTED}."):
            shown = name.removeprefix(f"{NOTED}.")
            request.record("changed_setting", name=shown, checkpoint=old, run=new)
            log.warning("%s is %r in the checkpoint of step %d and %r in this run", shown, old, manifest.step, new)
        elif any(name == allowed or name.startswith(f"{allowed}.") for allowed in request.allow):
            request.record("allowed_difference", name=name, checkpoint=old, run=new)
            log.warning("%s is %r in the checkpoint and %r from step %d on (--allow)", name, old, new, manifest.step)
        else:
            differing[name] = old, new
    if list(differing) == ["model.vocab_size"]:
        raise _other_padding(*differing["model.vocab_size"])
    if differing:
        shown = "; ".join(
            f"{name}: {old!r} in the checkpoint, {new!r} in this run" for name, (old, new) in differing.items()
        )
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} belongs to another run: {shown}. {_way_out(differing)}"
        )


def _differences(manifest: Manifest, identity: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The facts that differ, by name: value in the checkpoint, value in this run."""
    known: dict[str, Any] = dict(manifest.identity)
    wanted: dict[str, Any] = dict(identity)
    if "imported" in manifest.extra:  # it knows the model that computes its weights, and no schedule or data
        wanted = {name: wanted[name] for name in known.keys() & wanted.keys()}
    for section in _NEW_SECTIONS:
        if section not in known:
            wanted.pop(section, None)
    batch_changes = wanted.pop("batch_changes", [])
    known.pop("batch_changes", None)
    if "batch_size" in identity and "imported" not in manifest.extra and manifest.rank_states:
        known["batch_size"] = _batch_size_in_use(manifest)  # earlier versions record it here alone
        wanted["batch_size"] = _planned(manifest, identity["batch_size"], batch_changes)
    known.pop("weight_changes", None)
    changes = wanted.pop("weight_changes", [])
    current = flat(wanted)
    saved = _defaults(current) | flat(known)
    if "imported" in manifest.extra:  # under RoPE it leaves model.seq_len free
        current = {name: current.get(name) for name in saved}
    names = sorted(saved.keys() | current.keys())
    found = {name: (saved.get(name), current.get(name)) for name in names if saved.get(name) != current.get(name)}
    if "data_weights" in wanted and "data_weights" not in found:
        used, planned = _weights_in_use(manifest), list(_planned(manifest, wanted["data_weights"], changes))
        if used is not None and used != planned:
            found["data_weights"] = used, planned
    return found


def _defaults(current: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of settings in `current`: what a checkpoint means that an earlier version saved without them."""
    defaults: dict[str, Any] = {}
    for section, settings in _SETTINGS.items():
        declared = settings.model_construct().model_dump(mode="json")  # fields without a default are left out
        defaults |= {f"{section}.{name}": value for name, value in declared.items() if f"{section}.{name}" in current}
    return defaults


def _weights_in_use(manifest: Manifest) -> list[float] | None:
    """The weights of the sources that the last sample before the checkpoint was drawn with; None if not recorded."""
    history = manifest.rank_states[0].get("weights") if manifest.rank_states else None
    try:
        return list(history[-1][1]) if history else None
    except (TypeError, LookupError):
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} states weights of its sources that are none; use another one"
        ) from None


def _batch_size_in_use(manifest: Manifest) -> Any:
    """The batch size of the last step before the checkpoint, as the data's state records it."""
    state = manifest.rank_states[0]
    try:
        past = [size for step, size in state.get("batch_sizes") or () if step < _data_step(manifest)]
    except (TypeError, ValueError):
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} states batch sizes that are none; use another one"
        ) from None
    return past[-1] if past else state.get("global_batch_size")


def _planned(manifest: Manifest, first: Any, changes: list[Any]) -> Any:
    """What the recipe gives for the last step before the checkpoint, where `changes` are [step, value]."""
    past = [value for step, value in changes if step < _data_step(manifest)]
    return past[-1] if past else first


def _data_step(manifest: Manifest) -> int:
    return manifest.step + manifest.extra.get("skipped", 0)


def _way_out(differing: Iterable[str]) -> str:
    """What to do about facts that differ. Only some sections can be allowed (`train.run_folder.MAY_DIFFER`)."""
    sections = dict.fromkeys(name.partition(".")[0] for name in differing)
    if all(section in MAY_DIFFER for section in sections):
        options = " ".join(f"--allow {section}" for section in sections)
        return f"Use the checkpoint's recipe or another run name, or permit the difference: {options}"
    return "Use the checkpoint's recipe, or another run name"


def check_tensors(manifest: Manifest, state: Mapping[str, CheckpointTensor]) -> None:
    """CheckpointError unless checkpoint and state have the same names, shapes and types."""
    if "averaged" in manifest.extra:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} is an average of weights, without optimizer state; start a new "
            "run from it: keepstep checkpoint import AVERAGE RECIPE RUN --from keepstep"
        )
    missing = sorted(name for name in state.keys() - manifest.state_names if not _is_optional(name))
    unexpected = sorted(name for name in manifest.state_names - state.keys() if not _is_optional(name))
    if missing or unexpected:
        raise CheckpointError(
            f"the tensors of the checkpoint of step {manifest.step} are not those of the model and its optimizer: "
            f"{len(missing)} missing{_first(missing)}, {len(unexpected)} unexpected{_first(unexpected)}"
        )
    wrong: list[str] = []
    row_counts = set()
    for name in sorted(state.keys() & manifest.state_names):
        saved, tensor = manifest.pieces[name][0], state[name]
        shape = tuple(tensor.shape)
        if saved.shape != shape or saved.dtype != DTYPE_NAMES[tensor.dtype]:
            wrong.append(f"{name}: {saved.dtype} {saved.shape} saved, {DTYPE_NAMES[tensor.dtype]} {shape} wanted")
            only_rows_differ = saved.shape[1:] == shape[1:] and saved.shape != shape
            row_counts.add((saved.shape[:1], shape[:1], only_rows_differ))
    if not wrong:
        return
    if len(row_counts) == 1 and (counts := row_counts.pop())[2] and any("embed" in n or "head" in n for n in wrong):
        raise _other_padding(counts[0][0], counts[1][0])
    raise CheckpointError(f"{len(wrong)} tensors have another shape or type{_first(wrong)}")


def _is_optional(name: str) -> bool:
    """Whether a checkpoint may lack the tensor, or have it in vain: a run may begin or end an average of weights."""
    return name.startswith(_SCALER) or is_average(name)


def _other_padding(saved: int, wanted: int) -> CheckpointError:
    return CheckpointError(
        f"the vocabulary is padded to another size: {saved} rows saved, {wanted} in the model; "
        f"set model.vocab_size to {saved}"
    )


def _first(names: list[str]) -> str:
    """The first few names in parentheses; empty if there are none."""
    if not names:
        return ""
    return f" ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
