"""`keepstep checkpoint`: list, show, verify, compare, copy and import checkpoints.

A place is a checkpoint (`runs/a/checkpoints/step-00001000`), a run folder, its `checkpoints`, or a URL of one of these.
"""

import argparse
from pathlib import Path

from train.errors import CheckpointError


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    command = actions.add_parser("ls", help="the checkpoints of a run")
    command.add_argument("place")
    command = actions.add_parser("show", help="what a checkpoint holds (of a run: its newest)")
    command.add_argument("place")
    command.add_argument("--tensors", action="store_true", help="list every tensor and its pieces")
    command = actions.add_parser("verify", help="check every byte against its checksum (of a run: every checkpoint)")
    command.add_argument("place")
    command = actions.add_parser("diff", help="the facts and tensors in which two checkpoints differ")
    command.add_argument("first")
    command.add_argument("second")
    command = actions.add_parser("copy", help="copy a checkpoint (of a run: its newest), checking it on the way")
    command.add_argument("place")
    command.add_argument("target", help="the folder or URL of checkpoints that it goes into")
    command = actions.add_parser("import", help="make a checkpoint of another system's, to start a run from")
    command.add_argument("source")
    command.add_argument("recipe", help="the recipe whose model it is")
    command.add_argument("target", help="the folder of checkpoints that it goes into: RUN/checkpoints")
    command.add_argument("--from", dest="kind", choices=("dcp", "deepspeed", "universal", "huggingface"), required=True)
    command.add_argument(
        "--trust", action="store_true", help="unpickle the source's files: they can run any code on this machine"
    )


def run(options: argparse.Namespace) -> int:
    match options.action:
        case "ls":
            return _ls(options.place)
        case "show":
            return _show(options.place, options.tensors)
        case "verify":
            return _verify(options.place)
        case "diff":
            return _diff(options.first, options.second)
        case "copy":
            return _copy(options.place, options.target)
        case _:
            return _import(options)


def _ls(place: str) -> int:
    from train.checkpoint.format.manifest import DamagedError
    from train.checkpoint.format.verify import read_manifest
    from train.checkpoint.stores.open import open_root

    root = open_root(_root(place))
    if not (steps := root.steps()):
        raise CheckpointError(f"{place} holds no checkpoints")
    print(f"{'step':>10} {'tokens':>16} {'loss':>8} {'size':>10}  saved")
    for step in steps:
        try:
            manifest, _ = read_manifest(root.folder(step))
        except DamagedError as error:
            print(f"{step:>10} damaged: {error}")
            continue
        loss = "" if manifest.validation_loss is None else f"{manifest.validation_loss:.4f}"
        size = _size(sum(file.bytes for file in manifest.files))
        print(f"{step:>10} {manifest.tokens:>16,} {loss:>8} {size:>10}  {manifest.saved_at}")
    for damaged in root.quarantined():
        print(f"set aside as damaged: {damaged}")
    return 0


def _show(place: str, tensors: bool) -> int:
    from train.checkpoint.format.manifest import flat
    from train.checkpoint.format.verify import read_manifest
    from train.checkpoint.stores.open import open_folder

    path = _newest(place)
    manifest, _ = read_manifest(open_folder(path))
    facts = {name: getattr(manifest, name) for name in ("step", "tokens", "validation_loss", "saved_at", "extra")}
    facts |= {name: getattr(manifest, name) for name in ("layout", "versions", "identity")}
    print(path)
    for name, value in flat(facts).items():
        print(f"  {name}: {value}")
    size = sum(file.bytes for file in manifest.files)
    print(f"  {len(manifest.state_names)} tensors in {len(manifest.files)} files, {_size(size)}")
    for name in sorted(manifest.state_names) if tensors else ():
        pieces = manifest.pieces[name]
        print(f"  {name}: {pieces[0].dtype} {list(pieces[0].shape)}, {len(pieces)} pieces")
    return 0


def _verify(place: str) -> int:
    from train.checkpoint.format.verify import damage
    from train.checkpoint.stores.open import open_folder

    faults = {}
    for path in _all(place):
        faults[path] = damage(open_folder(path))
        print(f"{path}: {'; '.join(faults[path]) or 'every byte is as it was written'}", flush=True)
    if damaged := [path for path, found in faults.items() if found]:
        raise CheckpointError(f"{len(damaged)} of {len(faults)} checkpoints damaged: {', '.join(damaged)}")
    return 0


def _diff(first: str, second: str) -> int:
    """1 if they differ, as diff has it."""
    from train.checkpoint.format.compare import differences

    found = False
    for line in differences(Path(_newest(first)), Path(_newest(second))):
        found = True
        print(line, flush=True)
    if not found:
        print("the same in every fact and every bit")
    return int(found)


def _copy(place: str, target: str) -> int:
    from train.checkpoint.stores.copy import copy
    from train.checkpoint.stores.open import open_folder, open_root

    try:
        print(copy(open_folder(_newest(place)), open_root(target)))
    except OSError as error:
        raise CheckpointError(f"cannot write to {target}: {error}; nothing was left there") from error
    return 0


def _import(options: argparse.Namespace) -> int:
    from train.checkpoint.importing.importers import import_checkpoint

    print(import_checkpoint(options.kind, Path(options.source), options.recipe, options.target, options.trust))
    return 0


def _is_checkpoint(place: str) -> bool:
    from train.checkpoint.format.manifest import MANIFEST
    from train.checkpoint.stores.open import open_folder

    try:
        open_folder(place).size(MANIFEST)
    except OSError:
        return False
    return True


def _root(place: str) -> str:
    """The folder of checkpoints: the place itself, or its `checkpoints`."""
    from train.checkpoint.stores.open import open_root

    inner = f"{place.rstrip('/')}/checkpoints"
    return inner if open_root(inner).steps() else place


def _all(place: str) -> list[str]:
    """The checkpoint itself, or those of a run, oldest first."""
    from train.checkpoint.stores.open import open_root

    if _is_checkpoint(place):
        return [place]
    root = open_root(_root(place))
    if not (steps := root.steps()):
        raise CheckpointError(f"{place} is no checkpoint and holds none; name a run folder or a step-N folder")
    return [str(root.folder(step)) for step in steps]


def _newest(place: str) -> str:
    return _all(place)[-1]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
