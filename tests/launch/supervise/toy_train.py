"""A training process without a model, which keeps the contract that launchers rely on.

    toy_train.py FOLDER STEPS [FAULT ...]      FAULT: RANK@STEP:kill | RANK@STEP:EXIT_CODE, in the first attempt only

Every rank adds the same numbers. Rank 0 saves every 5 steps and prints each step. After a stop request all ranks exit
at the same step with code 75.
"""

import os
import signal
import sys
import time
from pathlib import Path

from train.health.stop import StopRequest

stop = StopRequest()
stop.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from parallel.environ import read_world  # noqa: E402

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
faults = dict(fault.split(":") for fault in sys.argv[3:]) if first_attempt else {}
world = read_world(os.environ)
dist.init_process_group("gloo")
saved = folder / "saved"
total, step = (int(word) for word in saved.read_text().split()) if saved.exists() else (0, 0)
with (folder / f"pids-{world.rank}").open("a") as pids:
    pids.write(f"{os.getpid()}\n")


def save() -> None:
    if world.rank == 0:
        saved.with_name("new").write_text(f"{total} {step}")
        saved.with_name("new").replace(saved)
    dist.barrier()


def leave(code: int) -> None:
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(code)


while step < steps:
    numbers = torch.tensor([step + world.rank, int(bool(stop))])
    try:
        dist.all_reduce(numbers)
    except RuntimeError as error:
        print(f"rank {world.rank} lost a peer: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    total, step = total + int(numbers[0]), step + 1
    fault = faults.get(f"{world.rank}@{step}")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault:
        print(f"rank {world.rank} cannot continue at step {step}", file=sys.stderr, flush=True)
        os._exit(int(fault))
    if world.rank == 0:
        print(f"step {step} total {total}", flush=True)
    time.sleep(0.05)
    if numbers[1]:
        save()
        leave(75)
    if step % 5 == 0:
        save()
save()
leave(0)
