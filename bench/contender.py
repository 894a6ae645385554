"""One contender of the step benchmark: its processes and its results."""

import contextlib
import json
import os
import statistics
import subprocess
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.peers.protocol import Spec

HERE = Path(__file__).parent


@dataclass
class Contender:
    """A program of `bench/peers` that trains the same model as the others, on one rank or several."""

    name: str
    program: str
    """File name in `bench/peers`."""
    python: str
    """The Python that runs it."""
    compile: bool = False
    processes: int = 1
    options: dict[str, str] = field(default_factory=dict)
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)
    ready_seconds: float = 0.0
    """Seconds from the command until the model and the optimizer are built."""
    first_step_seconds: float = 0.0
    """Seconds from the command to the end of the first step."""
    peak_gib: float = 0.0
    """Largest memory of a rank."""
    rounds: list[float] = field(default_factory=list)
    """Median seconds of a step in each round."""
    processor: list[float] = field(default_factory=list)
    """Processor seconds of a step in each round, summed over ranks."""
    failure: str = ""
    """Why it was left out; "" if it was not."""

    def launch(self, settings: dict[str, int], port: int, limit_seconds: float) -> None:
        """Start the ranks and wait for the first step. RuntimeError if it takes longer than the limit."""
        threads = max(1, (os.cpu_count() or 1) // self.processes)
        spec = Spec(**settings, threads=threads, compile=self.compile, options=self.options, started=time.time())  # pyright: ignore[reportArgumentType]
        self.failure = f"no first step within {limit_seconds:.0f} s"
        for rank in range(self.processes):
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE.parent)}
            if self.processes > 1:
                size = str(self.processes)
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
                environment |= {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [self.python, str(HERE / "peers" / self.program), json.dumps(asdict(spec))]
            pipe = subprocess.PIPE
            with self._log(rank).open("w", encoding="utf-8") as errors:
                self.ranks.append(
                    subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True)
                )
        alarm = threading.Timer(limit_seconds, self._kill)
        alarm.start()
        try:
            results = [self._read(rank) for rank in self.ranks]
        finally:
            alarm.cancel()
        self.failure = ""
        self.ready_seconds = max(record["ready_seconds"] for record in results)
        self.first_step_seconds = max(record["first_step_seconds"] for record in results)

    def run(self, steps: int) -> None:
        """Run one round of `steps` steps on all ranks. RuntimeError if a rank ends."""
        for rank in self.ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended; `_read` reports it
                print(steps, file=rank.stdin, flush=True)
        results = [self._read(rank) for rank in self.ranks]
        self.rounds.append(statistics.median(results[0]["clock"]))
        self.processor.append(sum(statistics.median(record["processor"]) for record in results))
        self.peak_gib = max(record["peak_gib"] for record in results)

    def stop(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.communicate(timeout=60)  # closes stdin, which ends the program

    def _read(self, rank: subprocess.Popen[str]) -> dict:
        """The next record that a rank prints."""
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("BENCH "):
                return json.loads(line.removeprefix("BENCH "))
        if rank.wait() >= 0 or not self.failure:  # not killed by the alarm
            self.failure = f"ended early, see {self._log(0)}"
        self._kill()
        self.stop()
        raise RuntimeError(f"{self.name}: {self.failure}")

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def _log(self, rank: int) -> Path:
        return Path(f"/tmp/keepstep-bench-{Path(self.program).stem}-{rank}.log")
