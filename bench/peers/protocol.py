"""The protocol between `bench/step.py` and each contender. It imports the standard library only.

`python CONTENDER.py SPEC`, with SPEC in JSON, builds its model, runs a first step and prints
`{"ready_seconds": ..., "first_step_seconds": ...}`. For each line N on stdin it then runs N steps and prints the wall
seconds and processor seconds of each, and its peak memory so far. It ends when stdin ends.
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
    """The model, the batch and the settings of a contender."""

    vocab_size: int
    seq_len: int
    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int
    micro_batch_size: int
    threads: int
    """Threads of each rank."""
    compile: bool
    options: dict[str, str]
    started: float
    """When the command was given, in seconds since the epoch."""


def read_spec() -> Spec:
    """The specification on the command line."""
    return Spec(**json.loads(sys.argv[1]))


def serve(spec: Spec, step: Callable[[], object]) -> None:
    """Run steps on request until stdin ends, and then end the process."""
    ready_seconds = time.time() - spec.started
    step()
    _print(ready_seconds=ready_seconds, first_step_seconds=time.time() - spec.started)
    for line in sys.stdin:
        clock, processor = [], []
        for _ in range(int(line)):
            began, used = time.perf_counter(), time.process_time()
            step()
            clock.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        _print(clock=clock, processor=processor, peak_gib=peak_gib)
    sys.stdout.flush()
    os._exit(0)  # process groups need not be closed here


def _print(**record: object) -> None:
    print("BENCH " + json.dumps(record), flush=True)
