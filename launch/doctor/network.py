"""Names, addresses, ports and clocks, for `keepstep doctor`.

Under a launcher (`srun keepstep doctor --cluster`) every node also connects to the first one, at a port of the range
that runs use, and they compare clocks. So a firewall or a wrong clock is found in the same way as by a run.
"""

import contextlib
import ctypes
import errno
import os
import re
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import cast

from launch.doctor.finding import Finding
from launch.supervise.network import endpoint, wait_for_head
from parallel.addresses import listen, meeting_point
from parallel.environ import FIRST_PORT, PORTS, World
from parallel.errors import LaunchError

RANGE = range(FIRST_PORT, FIRST_PORT + PORTS)
"""Ports at which the nodes of a Slurm job rendezvous; each attempt uses another one (`job_port`)."""
CONNECT_SECONDS = 30.0
"""Longest time that the nodes wait for each other."""
MOST_SILENT = 512
"""Connections to the first node that may wait without having sent anything."""
GREETING = re.compile(rb"([A-Za-z0-9._-]{1,255}) rank (\d{1,7})\n")
CLOCK = re.compile(rb"\d{1,12}\.\d{6}\n")
TIME_ERROR = 5
"""Answer of adjtimex while the kernel's clock is not synchronised."""
SKEW_SECONDS, BAD_SKEW_SECONDS = 1.0, 60.0
"""Differences between clocks that are a note and a problem."""


def name_finding(host: str, resolve: Callable[[str], str | None]) -> Finding:
    """Return whether other nodes can reach this machine by its own name."""
    address = resolve(host)
    if address is None or address.startswith("127."):
        return Finding(
            "note",
            f"the name {host} resolves to {address or 'nothing'} here",
            "other nodes cannot reach a program that listens at its own host name",
            "nothing for keepstep, which uses addresses; for torchrun by hand, set --local-addr and GLOO_SOCKET_IFNAME",
        )
    return Finding("ok", f"the name {host} resolves to {address}")


def resolve(host: str) -> str | None:
    """Return the address of a host name; None if it has none."""
    try:
        return socket.gethostbyname(host)
    except socket.gaierror:
        return None


def interface_finding(addresses: Mapping[str, str], fast: Collection[str]) -> Finding:
    """Return the network interfaces, given the interface of each address and the RDMA devices in `fast`."""
    if not addresses:
        return Finding(
            "note", "no network interface but loopback", "a run cannot leave this machine", "nothing, for one node"
        )
    interfaces = ", ".join(f"{interface} {address}" for address, interface in addresses.items())
    return Finding("ok", f"network: {interfaces}; RDMA devices: {', '.join(sorted(fast)) or 'none'}")


def rdma_devices() -> list[str]:
    """Return the names of InfiniBand and RoCE devices."""
    folder = Path("/sys/class/infiniband")
    return sorted(device.name for device in folder.iterdir()) if folder.is_dir() else []


def port_findings(ephemeral: range, reserved: str, taken: Mapping[int, str]) -> Iterator[Finding]:
    """Yield whether a run gets the ports of RANGE.

    `ephemeral` holds the ports of outgoing connections; `reserved`, in the kernel's format, those that are exempt;
    `taken` the ports of RANGE that cannot be bound, with the reason."""
    first, last = RANGE[0], RANGE[-1]
    if taken:
        some = ", ".join(str(port) for port in sorted(taken)[:5]) + (", ..." if len(taken) > 5 else "")
        yield Finding(
            "problem" if len(taken) == len(RANGE) else "note",
            f"{len(taken)} of the ports {first} to {last} cannot be bound: {some} ({next(iter(taken.values()))})",
            "an attempt whose port is one of them fails at its start",
            "end the program that listens there (ss -ltnp), or start by hand with --head HOST:PORT",
        )
    else:
        yield Finding("ok", f"ports {first} to {last} are free")
    overlap = range(max(first, ephemeral.start), min(last + 1, ephemeral.stop))
    if overlap and f"{first}-{last}" not in reserved.split(","):
        yield Finding(
            "note",
            f"outgoing connections take ports from {ephemeral.start} to {ephemeral.stop - 1}",
            f"one of them may occupy the port, of {first} to {last}, that a run needs",
            f"sysctl net.ipv4.ip_local_reserved_ports={first}-{last}",
        )


def ports_here() -> Iterator[Finding]:
    """Yield whether a run gets the ports of RANGE on this machine."""
    kernel = Path("/proc/sys/net/ipv4")
    low, high = (int(word) for word in (kernel / "ip_local_port_range").read_text().split())
    reserved = (kernel / "ip_local_reserved_ports").read_text().strip()
    yield from port_findings(range(low, high + 1), reserved, _taken())


def _taken() -> dict[int, str]:
    """Return the ports of RANGE that cannot be bound, with the reason. Binds each for a moment without listening."""
    found: dict[int, str] = {}
    for port in RANGE:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                found[port] = os.strerror(error.errno or errno.EADDRINUSE)
    return found


def clock_state() -> int:
    """Return the state of the kernel's clock from adjtimex: 0 to 4 mean synchronised."""
    timex = ctypes.create_string_buffer(256)  # all zero: change nothing
    return ctypes.CDLL(None).adjtimex(timex)


def clock_finding(state: int) -> Finding:
    """Return whether the clock is synchronised, given the answer of adjtimex."""
    if state == TIME_ERROR:
        return Finding(
            "note",
            "the clock is not synchronised",
            "clocks of nodes drift apart: their logs do not line up; munge and object stores refuse after minutes",
            "run chrony or systemd-timesyncd (for a container or virtual machine, on its host)",
        )
    return Finding("ok", "the clock is synchronised")


def skew_finding(seconds: float, other: str) -> Finding:
    """Return whether another clock, `seconds` ahead of this one, is close enough."""
    what = f"the clock of {other} is {seconds:+.3f} s from this one"
    if abs(seconds) < SKEW_SECONDS:
        return Finding("ok", what)
    return Finding(
        "problem" if abs(seconds) >= BAD_SKEW_SECONDS else "note",
        what,
        "logs and events of nodes do not line up; munge refuses jobs at 300 s, object stores at 900 s",
        "run chrony or systemd-timesyncd on both",
    )


def file_clock_finding(folder: Path) -> Finding:
    """Return whether the file system's clock is right; a network file system has the clock of its server."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".keepstep-doctor-") as file:
        before = time.time()
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        written, after = os.fstat(file.fileno()).st_mtime, time.time()
    return skew_finding(written - min(max(written, before), after), f"the file system of {folder.resolve()}")


def check_connections(world: World) -> list[Finding]:
    """Connect to the first node, or on it, wait for the connections of all others. Collective."""
    port = FIRST_PORT + (world.port - FIRST_PORT + PORTS // 2) % PORTS  # a run in this step would use world.port
    head, is_certain = meeting_point(world)
    if world.rank == 0:
        return list(_answer(head if is_certain else "", port, world.world_size - 1))
    try:
        wait_for_head(head, port, CONNECT_SECONDS)
        with socket.create_connection((head, port), timeout=CONNECT_SECONDS) as connection:
            before = time.time()
            connection.sendall(f"{socket.gethostname()} rank {world.rank}\n".encode())
            answer, after = connection.recv(64), time.time()
            if not CLOCK.fullmatch(answer):
                raise ValueError(f"the program there does not answer as keepstep does ({answer[:20]!r})")
            clock_of_head = float(answer)
    except (LaunchError, OSError, ValueError) as error:
        return [
            Finding(
                "problem",
                f"{endpoint(head, port)} on the first node cannot be reached: {error}",
                "the ranks of a run rendezvous there",
                f"open TCP ports {RANGE[0]} to {RANGE[-1]} and the ephemeral ports between the nodes",
            )
        ]
    return [
        Finding("ok", f"the first node answers at {endpoint(head, port)}"),
        skew_finding(clock_of_head - (before + after) / 2, world.head),
    ]


def _answer(address: str, port: int, expected: int) -> Iterator[Finding]:
    """Accept connections until all have come or the time is over; send the clock to each."""
    hosts: dict[int, str] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    with listen(address, port) as server, selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        while len(hosts) < expected and (left := deadline - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                peer = cast("socket.socket", key.fileobj)
                if peer is server:
                    _accept(server, ready)
                    continue
                if (found := _greeting(peer, expected)) is not None:
                    hosts |= found
                ready.unregister(peer)
                peer.close()
        for key in list(ready.get_map().values()):
            cast("socket.socket", key.fileobj).close()
    yield _connected(hosts, expected)


def _accept(server: socket.socket, ready: selectors.DefaultSelector) -> None:
    """Wait for the words of one more connection. Of too many that are silent, the oldest is closed."""
    with contextlib.suppress(OSError):
        peer, _ = server.accept()
        ready.register(peer, selectors.EVENT_READ)
        silent = [cast("socket.socket", key.fileobj) for key in ready.get_map().values() if key.fileobj is not server]
        if len(silent) > MOST_SILENT:
            ready.unregister(silent[0])
            silent[0].close()


def _greeting(peer: socket.socket, expected: int) -> dict[int, str] | None:
    """Answer a connection with the clock. Returns the host by its rank, or None if the peer is no node of this step."""
    try:
        peer.settimeout(2)
        words = GREETING.fullmatch(peer.recv(256))  # `wait_for_head` closes its connection and sends nothing
        if words is None or not 0 < int(words[2]) <= expected:
            return None
        peer.sendall(f"{time.time():.6f}\n".encode())
        return {int(words[2]): words[1].decode()}
    except OSError:
        return None


def _connected(hosts: Mapping[int, str], expected: int) -> Finding:
    if len(hosts) == expected:
        return Finding("ok", f"all {expected} other nodes connected")
    return Finding(
        "problem",
        f"{len(hosts)} of {expected} other nodes connected within {CONNECT_SECONDS:.0f} s: "
        f"{', '.join(f'{host} rank {rank}' for rank, host in sorted(hosts.items())) or 'none'}",
        "a run on these nodes would not start",
        "see the findings of the nodes that are missing",
    )
