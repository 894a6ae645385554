"""Fuzzes one format after the other: draws inputs, has the server run them, and judges what came back."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed

from tests.hostile.fuzz.box import fill, leaked, make_box, snapshot
from tests.hostile.fuzz.format import Consumer, Files, Format, Input, inputs

ROOT = Path(__file__).absolute().parents[3]
GROWN_BYTES = 500 << 20
"""Memory that a consumer may add."""
LONGEST_MESSAGE = 20_000
CONTROL = {chr(code) for code in range(32)} - {"\t"} | {"\x7f"}


@dataclass
class Report:
    """What happened to the inputs of one format."""

    format: str
    inputs: int = 0
    refused: int = 0
    """Inputs that at least one consumer refused."""
    slowest_seconds: float = 0.0
    """Most CPU time of a consumer."""
    grown_bytes: int = 0
    """Most memory that a consumer added."""
    findings: dict[str, str] = field(default_factory=dict[str, str])
    """The shortest input of each kind of fault, by the kind."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """Inputs with each kind of fault."""

    def add(self, kind: str, what: str) -> None:
        """Record a fault."""
        self.counts[kind] += 1
        if len(what) < len(self.findings.get(kind, what + " ")):
            self.findings[kind] = what


class Session:
    """A server and its box. `cpu_seconds`: CPU time after which a consumer counts as hanging; `wall_seconds`: time
    after which the consumers of an input count as blocked."""

    def __init__(self, folder: Path, cpu_seconds: int, wall_seconds: float) -> None:
        self._folder, self._box, self._cpu_seconds = folder, folder / "box", cpu_seconds
        make_box(self._box)
        arguments = [str(self._box), str(2 * cpu_seconds), str(wall_seconds)]
        with (folder / "server.log").open("w") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.fuzz.server", *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._answer() == "ready\n", self._log()

    def fuzz(self, chosen: Format, number: int, seed: int | None = None) -> Report:
        """Run `number` inputs of a format. Without a seed, they are the same every time."""
        pristine = self._folder / chosen.name
        built = self._ask(format=chosen.name, build=str(pristine))
        assert built["ending"] == "", (built, self._log())
        found = sorted(path for path in pristine.rglob("*") if path.is_file())
        files = Files({str(path.relative_to(pristine)): path.read_bytes() for path in found})
        report, before = Report(chosen.name), snapshot(self._box)
        expected = self._expected(chosen, pristine, files)

        def check(drawn: Input) -> None:
            fill(self._box, pristine, drawn.changes)
            answer = self._ask(format=chosen.name)
            report.inputs += 1
            for kind, more in self._faults(chosen, drawn, answer, expected, before):
                report.add(kind, f"{drawn.label}{more}")
            outcomes = [outcome for outcome in answer["outcomes"] if "consumer" in outcome]
            report.refused += any("refused" in outcome for outcome in outcomes)
            report.slowest_seconds = max([report.slowest_seconds, *(o["cpu_seconds"] for o in outcomes)])
            report.grown_bytes = max([report.grown_bytes, *(o["grown_bytes"] for o in outcomes)])

        run = settings(
            max_examples=number,
            derandomize=seed is None,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=cast(list[HealthCheck], list(HealthCheck)),
        )(given(inputs(chosen, files, self._box))(check))
        (run if seed is None else with_seed(seed)(run))()
        return report

    def _expected(self, chosen: Format, pristine: Path, files: Files) -> dict[str, str]:
        """What each consumer returns for the valid folder. It must accept it, and what the codecs write of it."""
        results: list[dict[str, str]] = []
        codecs = [(name, codec) for name, codec in chosen.targets if codec is not None]
        same = [codec.encode(files, name, codec.decode(files[name])) for name, codec in codecs if codec.is_signed]
        for changes in ({}, {}, *same):
            fill(self._box, pristine, changes)
            answer = self._ask(format=chosen.name)
            outcomes = [outcome for outcome in answer["outcomes"] if "consumer" in outcome]
            assert not answer["ending"], answer
            assert all("result" in outcome for outcome in outcomes), (chosen.name, list(changes), outcomes)
            results.append({outcome["consumer"]: outcome["result"] for outcome in outcomes})
            for consumer, outcome in zip(chosen.consumers, outcomes, strict=True):
                faults = list(self._judge(consumer, Input({}, "valid"), outcome, outcome["result"]))
                assert not faults, (chosen.name, faults)
        assert all(result == results[0] for result in results), f"{chosen.name}: the result is not always the same"
        return results[0]

    def _faults(
        self, chosen: Format, drawn: Input, answer: dict[str, Any], expected: dict[str, str], before: dict[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """The kind of each fault of one input, and more about it; nothing if everything is as promised."""
        if answer["ending"]:
            begun = [outcome["begun"] for outcome in answer["outcomes"] if "begun" in outcome]
            yield f"{(begun or ['start'])[-1]}: ended by {answer['ending']}", ""
        consumers = {consumer.name: consumer for consumer in chosen.consumers}
        for outcome in (outcome for outcome in answer["outcomes"] if "consumer" in outcome):
            name = outcome["consumer"]
            if "crashed" in outcome:
                error, _, message = outcome["crashed"].partition(": ")
                yield f"{error} in {outcome['where']}", f" ({name}: {message[:200]})"
            for fault in self._judge(consumers[name], drawn, outcome, expected[name]):
                yield f"{name}: {fault}", ""
        if (now := snapshot(self._box)) != before:
            changed = [path for path in now.keys() | before.keys() if now.get(path) != before.get(path)]
            yield f"wrote outside: {changed}", ""
            shutil.rmtree(self._box)
            make_box(self._box)
        if leak := leaked(self._box):
            yield f"published the secret in {leak}", ""

    def _judge(self, consumer: Consumer, drawn: Input, outcome: dict[str, Any], expected: str) -> Iterator[str]:
        """The faults of an outcome that is no crash."""
        for what in outcome["violations"]:
            may_read = what == "read the secret" and drawn.is_link
            may_unpickle = what.startswith("pickle.") and {"*", what.split("'")[1]} & set(consumer.unpickles)
            if not may_read and not may_unpickle:
                yield what
        if "refused" in outcome:
            message, where = outcome["refused"], outcome["where"]
            if consumer.accepts and not drawn.is_special:
                yield f"refused: {message[:150]} ({where})"
            if CONTROL & set(message):
                yield f"the message has control characters ({where})"
            if len(message) > LONGEST_MESSAGE:
                yield f"the message has over {LONGEST_MESSAGE} characters ({where})"
            if not message.strip():
                yield f"the message is empty ({where})"
        if consumer.exact and outcome.get("result", expected) != expected:
            yield "accepted with another result"
        if outcome["cpu_seconds"] > self._cpu_seconds:
            yield f"took over {self._cpu_seconds} s of CPU time"
        if outcome["grown_bytes"] > GROWN_BYTES:
            yield f"took over {GROWN_BYTES >> 20} MB of memory"

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._server.stdin is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = self._answer()
        assert answer, self._log()
        return json.loads(answer)

    def _answer(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline()

    def _log(self) -> str:
        return (self._folder / "server.log").read_text()[-3000:]

    def close(self) -> None:
        """End the server."""
        for stream in (self._server.stdin, self._server.stdout):  # the server ends with its input
            assert stream is not None
            stream.close()
        self._server.wait()


@contextlib.contextmanager
def session(folder: Path, cpu_seconds: int, wall_seconds: float) -> Generator[Session]:
    """Yield a session and end its server."""
    opened = Session(folder, cpu_seconds, wall_seconds)
    try:
        yield opened
    finally:
        opened.close()
