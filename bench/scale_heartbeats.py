"""Heartbeats of simulated ranks, for `bench.scale`: over real connections to the store of a real watchdog."""

# torch.distributed does not export its stores as its documentation does.
# pyright: reportPrivateImportUsage=false

import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from train.health import watchdog as module
from train.health.heartbeats import Heartbeat
from train.health.watchdog import STATUS_SECONDS, Watchdog

ROUNDS = 3
CONNECTIONS = 256
"""Connections that the ranks share. To make one takes 0.1 s where names cannot be looked up, and messages cost the
same on any: between 256 and 4,095 connections the figures of 4,096 ranks differed little."""
STATUS = "status_seconds"
LIMIT = timedelta(seconds=600)


def heartbeats(ranks: int) -> dict[str, float]:
    """CPU seconds at rank 0 of one round of heartbeats, and of status.json, and the share of a core that they take."""
    to_ranks, orders = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    senders = context.Process(target=_send_heartbeats, args=(ranks, orders), daemon=True)
    senders.start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    module._connect_to_store = lambda: dist.PrefixStore("watchdog", store)  # pyright: ignore[reportPrivateUsage]
    folder = Path(tempfile.mkdtemp())
    dog = Watchdog(
        folder / "status.json", folder, rank=0, world_size=ranks, hang_seconds=480, record=lambda *_, **__: None
    )
    dog.close()  # rounds are run by hand
    rounds, status = [], []
    to_ranks.send(store.port)
    to_ranks.recv()
    for number in range(ROUNDS + 1):
        dog._last_status = time.monotonic()  # pyright: ignore[reportPrivateUsage]
        started = time.process_time()  # of the store's thread too
        to_ranks.send(number)
        to_ranks.recv()
        dog._round(1.0)  # pyright: ignore[reportPrivateUsage]
        between = time.process_time()
        dog._write_status()  # pyright: ignore[reportPrivateUsage]
        rounds.append(between - started)
        status.append(time.process_time() - between)
    to_ranks.send(None)
    senders.join()
    seconds, status_seconds, interval = min(rounds[1:]), min(status), dog._interval_seconds  # pyright: ignore
    share = seconds / interval + status_seconds / STATUS_SECONDS
    return {"seconds": seconds, STATUS: status_seconds, "interval": interval, "share": share}


def _send_heartbeats(ranks: int, orders: Connection) -> None:
    """Send what all ranks but rank 0 send in a round, whenever a number arrives."""
    port = orders.recv()
    stores = [
        dist.PrefixStore("watchdog", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT))
        for _ in range(min(ranks - 1, CONNECTIONS))
    ]
    orders.send("connected")
    while (number := orders.recv()) is not None:
        for rank in range(1, ranks):
            store = stores[rank % len(stores)]
            beat = Heartbeat(rank, f"node{rank // 8}", 1000 + rank, "forward", number, 4 * number, sequence=number)
            beat = replace(beat, location="torch.autograd.graph:869 _engine_run_backward", step_seconds=1.5)
            store.set(f"heartbeat/{rank}", json.dumps(asdict(beat)))  # as Watchdog._round does
            store.check(["hang"])
            store.check(["failed"])
        orders.send("sent")
    os._exit(0)
