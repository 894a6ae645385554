"""The rendezvous of a run's nodes: the head's address and port, and waiting for it.

    python -m launch.supervise.network port JOB ATTEMPT     # prints the port of one attempt of a Slurm job

`parallel/addresses.py` finds this machine's addresses.
"""

import argparse
import socket
import sys
import time
from collections.abc import Sequence

from parallel.addresses import listen
from parallel.environ import job_port
from parallel.errors import LaunchError

JOIN_SECONDS = 280
"""Longest time that nodes wait for each other at the start."""


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`. IPv6 addresses are in brackets: `[fe80::1]:29400`. LaunchError if wrong."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise LaunchError(f"--head {text}: write an IPv6 address in brackets, such as [{host}]:{port}")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise LaunchError(f"--head {text} must read HOST:PORT, such as 10.0.0.7:29400")
    return host, int(port)


def endpoint(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(address: str, port: int) -> None:
    """Raise LaunchError if another program listens on this port of this machine, which is the head."""
    try:
        listen(address, port).close()
    except OSError as error:
        raise LaunchError(
            f"port {port} of this machine ({socket.gethostname()}), where node 0 must listen, is taken "
            f"({error.strerror}); choose another with --head HOST:PORT on all nodes"
        ) from None


def wait_for_head(host: str, port: int, wait_seconds: float) -> None:
    """Wait until node 0 listens, and print a line every 10 s. LaunchError after `wait_seconds`."""
    start = last_report = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        now = time.monotonic()
        if now - start > wait_seconds:
            raise LaunchError(
                f"node 0 does not answer at {endpoint(host, port)} after {wait_seconds:.0f} s ({reason}); start it "
                "with --node-rank 0, or correct --head"
            )
        if now - last_report > 10:
            last_report = now
            print(f"keepstep: waiting for node 0 at {endpoint(host, port)} ({reason})", flush=True)
        time.sleep(0.3)


def main(argv: Sequence[str]) -> int:
    """Print the port at which the nodes of one attempt of a Slurm job rendezvous; slurm/train.sbatch asks for it."""
    parser = argparse.ArgumentParser(prog="python -m launch.supervise.network")
    parser.add_argument("action", choices=("port",))
    parser.add_argument("job", type=int, help="SLURM_JOB_ID")
    parser.add_argument("attempt", type=int, help="SLURM_RESTART_COUNT, or 0")
    options = parser.parse_args(argv)
    print(job_port(options.job, options.attempt))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
