"""`keepstep checkpoint`: list, show, verify, compare, copy, average, import and convert checkpoints."""

import argparse
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.commands.models import derive
from launch.inspect.checkpoints import checkpoints_at, newest_at, reading, root_at
from launch.terminal import add_json_option, local_time, print_facts, print_json, print_table, progress, size
from train.checkpoint.importing.kinds import KINDS
from train.errors import CheckpointError

if TYPE_CHECKING:
    from train.checkpoint.format.manifest import Manifest

PATH_HELP = "a checkpoint, a run folder or its checkpoints folder, or the URL of one of these"
EXAMPLES = """\
examples:
  keepstep checkpoint ls runs/laptop
  keepstep checkpoint diff runs/a runs/b                  # the newest checkpoints of two runs
  keepstep checkpoint copy runs/a s3://bucket/a/checkpoints
  keepstep checkpoint average runs/a runs/averaged --last 5
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `keepstep checkpoint` with their arguments."""
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, summary: str, act: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=summary, description=summary)
        action.set_defaults(act=act)
        add_json_option(action)
        return action

    add("ls", "list the checkpoints of a run", _ls).add_argument("path", help=PATH_HELP)
    show = add("show", "show a checkpoint, or the newest of a run", _show)
    show.add_argument("path", help=PATH_HELP)
    show.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = add("verify", "check every byte of a checkpoint, or of all checkpoints of a run", _verify)
    verify.add_argument("path", help=PATH_HELP)
    diff = add("diff", "list the facts and tensors in which two checkpoints differ; exit code 1 if any do", _diff)
    diff.add_argument("first", help=PATH_HELP)
    diff.add_argument("second", help=PATH_HELP)
    copy = add("copy", "copy a checkpoint, or the newest of a run, and verify it meanwhile", _copy)
    copy.add_argument("path", help=PATH_HELP)
    copy.add_argument("target", help="folder or URL of checkpoints that receives the copy")
    derive.configure_average(add("average", "average the weights of checkpoints", derive.average))
    derive.configure_convert(add("convert", "write a checkpoint in the layout of another system", derive.convert))
    importing = add("import", "convert a checkpoint of another system to one from which a run starts", _import)
    importing.add_argument("source", type=Path, help="folder of the other system's checkpoint")
    importing.add_argument(
        "recipe", nargs="?", help="recipe with the same model; without it, one is written to RUN/recipe.yaml"
    )
    importing.add_argument("target", metavar="run", help="run folder that receives the checkpoint, or its URL")
    kinds = "; ".join(f"{name}: {kind.summary}" for name, kind in KINDS.items()).replace("%", "%%")
    importing.add_argument("--from", dest="kind", choices=sorted(KINDS), required=True, help=kinds)
    importing.add_argument(
        "--trust", action="store_true", help="allow unpickling of the source's files, which can run any code"
    )
    importing.add_argument(
        "--rope",
        choices=("auto", "halves", "neighbours"),
        default="auto",
        help="elements of a head that RoPE turns together: i and i + half, or 2i and 2i + 1 (default: by the names)",
    )
    importing.add_argument(
        "--check", action="store_true", help="compare logits with transformers in fp32 before anything is saved"
    )


def run(options: argparse.Namespace) -> int:
    """Run the action and return its exit code."""
    return options.act(options)


def _ls(options: argparse.Namespace) -> int:
    from train.checkpoint.format.manifest import DamagedError
    from train.checkpoint.format.verify import read_manifest

    root = root_at(options.path)
    if not (steps := root.steps()):
        raise CheckpointError(f"{options.path} has no checkpoints; name a run folder, such as runs/laptop")
    found: list[dict[str, Any]] = []
    for step in steps:
        folder = root.folder(step)
        try:
            found.append(_facts(read_manifest(folder)[0]) | {"path": str(folder)})
        except DamagedError as error:
            found.append({"step": step, "path": str(folder), "damaged": str(error)})
    quarantined = root.quarantined()
    if options.json:
        print_json({"checkpoints": found, "quarantined": quarantined})
        return 0
    print_table([">step", ">tokens", ">validation loss", ">size", "saved"], [_row(facts) for facts in found])
    for path in quarantined:
        print(f"quarantined as damaged: {path}")
    return 0


def _facts(manifest: "Manifest") -> dict[str, Any]:
    return {
        "step": manifest.step,
        "tokens": manifest.tokens,
        "validation_loss": manifest.validation_loss,
        "bytes": manifest.file_bytes,
        "saved_at": manifest.saved_at,
    }


def _row(facts: dict[str, Any]) -> list[str]:
    if "damaged" in facts:
        return [str(facts["step"]), "", "", "", f"damaged: {facts['damaged']}"]
    loss = "" if facts["validation_loss"] is None else f"{facts['validation_loss']:.4f}"
    return [str(facts["step"]), f"{facts['tokens']:,}", loss, size(facts["bytes"]), _local(facts["saved_at"])]


def _local(saved_at: str) -> str:
    """The time in the local zone; the text itself, shortened, if it is no time."""
    try:
        return local_time(datetime.fromisoformat(saved_at).timestamp())
    except (ValueError, OverflowError, OSError):
        return repr(saved_at[:40])


def _show(options: argparse.Namespace) -> int:
    from train.checkpoint.format.manifest import flat
    from train.checkpoint.format.verify import read_manifest
    from train.checkpoint.stores.open import open_folder

    path = newest_at(options.path)
    manifest, _ = read_manifest(open_folder(path))
    facts = _facts(manifest)
    details = {name: getattr(manifest, name) for name in ("extra", "layout", "versions", "identity")}
    tensors: dict[str, dict[str, Any]] = {
        name: {"dtype": pieces[0].dtype, "shape": list(pieces[0].shape), "pieces": len(pieces)}
        for name in sorted(manifest.state_names)
        for pieces in [manifest.pieces[name]]
    }
    counts = {"tensors": len(tensors), "files": len(manifest.files) + len(manifest.attachments)}
    if options.json:
        listed = {"tensor_list": tensors} if options.tensors else {}
        print_json({"path": path, **facts, **counts, **details, **listed})
        return 0
    print(path)
    shown = [("step", str(facts["step"])), ("tokens", f"{facts['tokens']:,}")]
    shown += [] if facts["validation_loss"] is None else [("validation loss", f"{facts['validation_loss']:.4f}")]
    shown += [("size", f"{size(facts['bytes'])}: {counts['tensors']} tensors in {counts['files']} files")]
    shown += [("saved", _local(facts["saved_at"]))]
    print_facts(shown + [(name, _shortened(value)) for name, value in flat(details).items() if value not in ({}, [])])
    if options.tensors:
        rows = [[name, t["dtype"], str(t["shape"]), str(t["pieces"])] for name, t in tensors.items()]
        print_table(["tensor", "type", "shape", ">pieces"], rows)
    return 0


def _shortened(value: Any) -> str:
    text = str(value) if str(value).isprintable() else repr(value)  # no control character reaches the terminal
    return text if len(text) <= 100 else f"{text[:100]} ... (--json shows all)"


def _verify(options: argparse.Namespace) -> int:
    from train.checkpoint.format.verify import find_faults

    faults: dict[str, list[str]] = {}
    for path in checkpoints_at(options.path):
        with reading("verifying", path) as folder:
            faults[path] = find_faults(folder)
        if not options.json:
            print(f"{path}: {'; '.join(faults[path]) or 'every byte matches its checksum'}", flush=True)
    if options.json:
        print_json({"checkpoints": [{"path": path, "faults": found} for path, found in faults.items()]})
    if damaged := [path for path, found in faults.items() if found]:
        raise CheckpointError(f"{len(damaged)} of {len(faults)} checkpoints damaged: {', '.join(damaged)}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    from train.checkpoint.format.compare import differences

    first, second = (newest_at(path) for path in (options.first, options.second))
    found: list[str] = []
    for line in differences(Path(first), Path(second)):
        found.append(line)
        if not options.json:
            print(line if len(line) <= 400 else f"{line[:400]} ... (--json shows all)", flush=True)
    if options.json:
        print_json({"first": first, "second": second, "equal": not found, "differences": found})
    elif not found:
        print("the same in every fact and every bit")
    return 1 if found else 0


def _copy(options: argparse.Namespace) -> int:
    from train.checkpoint.stores.copy import copy
    from train.checkpoint.stores.open import open_root

    path = newest_at(options.path)
    try:
        with reading("copying", path) as folder:
            made = str(copy(folder, open_root(options.target)))
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {options.target}: {error}; nothing was left there; correct the target"
        ) from error
    return _created(made, path, options.json)


def _import(options: argparse.Namespace) -> int:
    from train.checkpoint.importing.importers import Request, import_checkpoint

    names = ("kind", "source", "recipe", "target", "trust", "rope", "check")
    with progress(f"importing {options.source}", None):
        made = import_checkpoint(Request(**{name: getattr(options, name) for name in names}))
    for note in made.notes:
        print(f"note: {note}", file=sys.stderr)
    return _created(made.path, str(options.source), options.json)


def _created(path: str, source: str, as_json: bool) -> int:
    if as_json:
        print_json({"path": path, "source": source})
    else:
        print(path)
    return 0
