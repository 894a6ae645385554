"""Runs the consumers of one input in a forked process with limits, and reports how each ended.

    python -m tests.hostile.fuzz.server BOX CPU_SECONDS WALL_SECONDS

reads requests from standard input, one JSON object a line, and answers each with one line. The process imports what
consumers need once; every input then has a process of its own, which may hang, run out of memory or crash.
"""

import contextlib
import gc
import importlib
import io
import json
import math
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from tests.hostile.fuzz.box import WRITABLE
from tests.hostile.fuzz.format import Consumer

MODULES = (
    "launch.cli", "launch.inspect.run_status", "train.checkpoint.manager", "train.checkpoint.fill", "train.config_file",
    "train.checkpoint.importing.importers", "train.checkpoint.importing.keepstep", "train.export.trained_model",
    "train.checkpoint.importing.hugging_face", "data_pipeline.build.prepare", "data_pipeline.stream.stream",
    "data_pipeline.sources.parquet", "sentencepiece", "tokenizers", "tiktoken", "pyarrow.parquet", "launch.terminal",
    "launch.commands.data", "launch.commands.checkpoint", "launch.commands.status", "launch.commands.monitoring.report",
    "launch.commands.stop", "rich.table", "rich.console",
)  # fmt: skip
"""Imported before the first input."""
ADDRESS_BYTES = 4 << 30
"""Address space that a consumer may add, so that a fault cannot exhaust the machine."""
PACKAGES = ("launch", "train", "parallel", "data_pipeline")
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
RUNS_CODE = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class")
"""Audit events of a process that runs something that a file names."""
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod", "os.truncate")


def serve(box: Path, cpu_seconds: int, wall_seconds: float) -> None:
    """Answer requests until standard input ends. The limits are for all consumers of one input together."""
    from tests.hostile.fuzz.formats.all import FORMATS
    from tests.hostile.fuzz.formats.checkpoints import state_of
    from tests.hostile.fuzz.formats.faulty import FAULTY

    for module in MODULES:
        importlib.import_module(module)
    state_of(0)  # makes torch import what a model needs
    gc.freeze()  # so that a child's garbage collection does not copy the memory of this process
    os.environ |= {"HOME": str(box / "home"), "TMPDIR": str(box / "tmp"), "TOKENIZERS_PARALLELISM": "false"}
    tempfile.tempdir = None
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        chosen = (FORMATS | FAULTY)[request["format"]]
        if "build" in request:
            result = _in_child(partial(_build, chosen.build, Path(request["build"])), math.inf)
        else:
            result = _in_child(partial(_consume, chosen.consumers, box, cpu_seconds), wall_seconds)
        print(json.dumps(result), file=answers, flush=True)


def _in_child(act: Callable[[IO[str]], None], wall_seconds: float) -> dict[str, Any]:
    """Run `act` in a forked process; what it wrote as JSON lines, and how the process ended."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        code = 1
        try:
            with os.fdopen(write, "w") as out:
                act(out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    ending, text, until = "", b"", time.monotonic() + wall_seconds
    while True:
        left = None if until == math.inf else max(0.0, until - time.monotonic())
        ready, _, _ = select.select([read], [], [], left)
        if not ready:
            ending = "blocked"
            os.kill(pid, signal.SIGKILL)
            break
        if not (more := os.read(read, 1 << 20)):
            break
        text += more
    os.close(read)
    _, status = os.waitpid(pid, 0)
    if not ending and os.WIFSIGNALED(status):
        ending = signal.Signals(os.WTERMSIG(status)).name
    outcomes = [json.loads(line) for line in text.decode(errors="replace").splitlines() if line.endswith("}")]
    return {"ending": ending or ("" if os.WEXITSTATUS(status) == 0 else "failed"), "outcomes": outcomes}


def _build(build: Callable[[Path], None], folder: Path, out: IO[str]) -> None:
    folder.mkdir()
    build(folder)


def _consume(consumers: list[Consumer], box: Path, cpu_seconds: int, out: IO[str]) -> None:
    """Call each consumer and write its outcome as one line."""
    os.chdir(box / "out")
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    used = _memory("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    violations = _watch(box)
    silence = io.StringIO()
    for consumer in consumers:
        target = box / "out" / consumer.name
        target.mkdir()
        violations.clear()
        before, began = _memory("VmRSS"), time.process_time()
        print(json.dumps({"begun": consumer.name}), file=out, flush=True)
        with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            warnings.simplefilter("ignore")
            outcome = _outcome(consumer, box / "in", target)
        outcome |= {
            "consumer": consumer.name,
            "cpu_seconds": time.process_time() - began,
            "grown_bytes": max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before),
            "violations": sorted(set(violations)),
        }
        print(json.dumps(outcome), file=out, flush=True)


def _outcome(consumer: Consumer, folder: Path, target: Path) -> dict[str, Any]:
    from train.errors import USER_ERRORS

    try:
        return {"result": consumer.call(folder, target)}
    except (*USER_ERRORS, *consumer.errors) as error:
        return {"refused": str(error), "type": type(error).__name__, "where": _where(error)}
    except BaseException as error:
        return {"crashed": f"{type(error).__name__}: {error}"[:500], "where": _where(error)}


def _where(error: BaseException) -> str:
    """The deepest line of Keepstep's own in the traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    own = [f for f in frames if any(f"/{top}/" in f.filename for top in PACKAGES)]
    chosen = (own or frames)[-1]
    return f"{'/'.join(Path(chosen.filename).parts[-3:])}:{chosen.lineno} {chosen.name}"


def _watch(box: Path) -> list[str]:
    """A list that receives what this process does outside of the box's writable folders."""
    violations: list[str] = []
    writable = tuple(f"{box / name}{os.sep}" for name in WRITABLE)

    def allowed(path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True
        full = os.path.join(os.path.realpath(os.path.dirname(os.fsdecode(path) or ".")), "")  # noqa: PTH118, PTH120
        return full.startswith(writable) or os.fsdecode(path).startswith(("/dev/", "/proc/self/"))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, int) and flags & WRITE_FLAGS and not allowed(os.path.realpath(path)):
                violations.append(f"opened {os.fsdecode(path)!r} to write")
            elif isinstance(path, str) and os.path.realpath(path).startswith(f"{box}/canary"):
                violations.append("read the secret")
        elif event in CHANGES and not all(allowed(path) for path in arguments[: 2 if "name" in event else 1]):
            violations.append(f"{event} {arguments[:2]!r}")
        elif event in RUNS_CODE:
            violations.append(f"{event} {arguments!r}"[:200])

    sys.addaudithook(hook)
    return violations


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
