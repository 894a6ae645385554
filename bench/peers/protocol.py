"""What every contender speaks with `bench/step.py`, whatever its environment: standard library only at import.

Started as `python CONTENDER.py SPEC` with SPEC in JSON, it builds its model, takes a first step and prints
`{"ready_seconds": ..., "first_step_seconds": ...}`; then for each line N on stdin it takes N steps and prints how
long each took, in seconds of the clock and in seconds of the processors, and its peak memory so far.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """The work. `started` is when the command was given, in seconds of `time.time()`."""

    vocab_size: int
    seq_len: int
    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int
    micro_batch_size: int
    threads: int
    compile: bool
    options: dict[str, str]
    started: float


def read_spec() -> Spec:
    return Spec(**json.loads(sys.argv[1]))


def serve(spec: Spec, step: Callable[[], object]) -> None:
    """Take steps when told, until stdin ends."""
    ready_seconds = time.time() - spec.started
    step()
    _say(ready_seconds=ready_seconds, first_step_seconds=time.time() - spec.started)
    for line in sys.stdin:
        clock, processor = [], []
        for _ in range(int(line)):
            began, used = time.perf_counter(), time.process_time()
            step()
            clock.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        _say(clock=clock, processor=processor, peak_gib=peak_gib)
    sys.stdout.flush()
    os._exit(0)  # process groups need no farewell here


def _say(**record: object) -> None:
    print("BENCH " + json.dumps(record), flush=True)
