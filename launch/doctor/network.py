"""Names, addresses, ports and clocks for `keepstep doctor`.

Under a launcher (`srun keepstep doctor --cluster`) the nodes also call each other: every node connects to the first at
a port of the range that runs use, and both tell their clocks. So a firewall and a clock that is off are found by the
way that a run would meet them.
"""

import ctypes
import errno
import os
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from launch.doctor.finding import Finding
from launch.supervise.network import endpoint, wait_for_head
from parallel.environ import FIRST_PORT, PORTS, World
from parallel.errors import LaunchError

RANGE = range(FIRST_PORT, FIRST_PORT + PORTS)
"""Where the job script and `srun python -m train` meet; each attempt at another port of it."""
MEET_SECONDS = 30.0
TIME_ERROR = 5
"""What adjtimex answers while the kernel's clock is not synchronised."""
SKEW_SECONDS, BAD_SKEW_SECONDS = 1.0, 60.0


def name_finding(host: str, resolve: Callable[[str], str | None]) -> Finding:
    address = resolve(host)
    if address is None or address.startswith("127."):
        return Finding(
            "note",
            f"the name {host} stands for {address or 'nothing'} here",
            "programs that listen on their own name are not reached by other nodes",
            "keepstep uses addresses; for torchrun by hand give --local-addr and GLOO_SOCKET_IFNAME",
        )
    return Finding("ok", f"the name {host} stands for {address}")


def resolve(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except socket.gaierror:
        return None


def interface_finding(addresses: Mapping[str, str], fast: Collection[str]) -> Finding:
    """`addresses`: interface by address; `fast`: InfiniBand and RoCE devices."""
    if not addresses:
        return Finding("note", "no network interface but loopback", "a run stays on this machine", "fine for one node")
    places = ", ".join(f"{interface} {address}" for address, interface in addresses.items())
    return Finding("ok", f"network: {places}; RDMA devices: {', '.join(sorted(fast)) or 'none'}")


def rdma_devices() -> list[str]:
    folder = Path("/sys/class/infiniband")
    return sorted(device.name for device in folder.iterdir()) if folder.is_dir() else []


def port_findings(ephemeral: range, reserved: str, taken: Mapping[int, str]) -> Iterator[Finding]:
    """`ephemeral`: where outgoing connections get their ports, `reserved`: those that they don't (as the kernel writes
    it); `taken`: ports of RANGE that cannot be bound, and why."""
    first, last = RANGE[0], RANGE[-1]
    if taken:
        some = ", ".join(str(port) for port in sorted(taken)[:5]) + (", ..." if len(taken) > 5 else "")
        yield Finding(
            "problem" if len(taken) == len(RANGE) else "note",
            f"{len(taken)} of the ports {first} to {last} cannot be bound: {some} ({next(iter(taken.values()))})",
            "an attempt that draws such a port fails at its start",
            "end what listens there (ss -ltnp), or start by hand with --head HOST:PORT",
        )
    else:
        yield Finding("ok", f"ports {first} to {last} are free")
    overlap = range(max(first, ephemeral.start), min(last + 1, ephemeral.stop))
    if overlap and f"{first}-{last}" not in reserved.split(","):
        yield Finding(
            "note",
            f"outgoing connections take ports from {ephemeral.start} to {ephemeral.stop - 1}",
            f"now and then one holds the port of {first} to {last} at which a run wants to meet",
            f"sysctl net.ipv4.ip_local_reserved_ports={first}-{last}",
        )


def ports_here() -> Iterator[Finding]:
    kernel = Path("/proc/sys/net/ipv4")
    low, high = (int(word) for word in (kernel / "ip_local_port_range").read_text().split())
    reserved = (kernel / "ip_local_reserved_ports").read_text().strip()
    yield from port_findings(range(low, high + 1), reserved, _taken())


def _taken() -> dict[int, str]:
    """Bound for a moment, not listened on."""
    found = {}
    for port in RANGE:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                found[port] = os.strerror(error.errno or errno.EADDRINUSE)
    return found


def clock_state() -> int:
    """The kernel's answer: 0 to 4 are synchronised."""
    timex = ctypes.create_string_buffer(256)  # all zero: change nothing
    return ctypes.CDLL(None).adjtimex(timex)


def clock_finding(state: int) -> Finding:
    if state == TIME_ERROR:
        return Finding(
            "note",
            "nothing tells the kernel that its clock is right",
            "clocks of nodes drift apart: their logs don't line up, munge and object stores refuse after minutes",
            "run chrony or systemd-timesyncd (in a container or virtual machine: on its host)",
        )
    return Finding("ok", "the clock is synchronised")


def skew_finding(seconds: float, other: str) -> Finding:
    """How far another clock is ahead of this one."""
    what = f"the clock of {other} is {seconds:+.3f} s from this one"
    if abs(seconds) < SKEW_SECONDS:
        return Finding("ok", what)
    return Finding(
        "problem" if abs(seconds) >= BAD_SKEW_SECONDS else "note",
        what,
        "logs and events of nodes don't line up; munge refuses jobs at 300 s, object stores at 900 s",
        "run chrony or systemd-timesyncd on both",
    )


def file_clock_finding(folder: Path) -> Finding:
    """The clock of whoever keeps the files: of a network file system, another machine's."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".keepstep-doctor-") as file:
        before = time.time()
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        written, after = os.fstat(file.fileno()).st_mtime, time.time()
    return skew_finding(written - min(max(written, before), after), f"the file system of {folder.resolve()}")


def meet(world: World) -> list[Finding]:
    """Call the first node, or on it, wait for the calls of all others. Collective among the launcher's processes."""
    port = FIRST_PORT + (world.port - FIRST_PORT + PORTS // 2) % PORTS  # not the one that a run in this step would use
    if world.rank == 0:
        return list(_answer(port, world.world_size - 1))
    try:
        wait_for_head(world.head, port, MEET_SECONDS)
        with socket.create_connection((world.head, port), timeout=MEET_SECONDS) as call:
            before = time.time()
            call.sendall(f"{socket.gethostname()} rank {world.rank}\n".encode())
            theirs, after = float(call.recv(64)), time.time()
    except (LaunchError, OSError, ValueError) as error:
        return [
            Finding(
                "problem",
                f"{endpoint(world.head, port)} on the first node is not reached: {error}",
                "the ranks of a run meet there",
                f"open TCP ports {RANGE[0]} to {RANGE[-1]} and the ephemeral ones between nodes",
            )
        ]
    return [
        Finding("ok", f"the first node answers at {endpoint(world.head, port)}"),
        skew_finding(theirs - (before + after) / 2, world.head),
    ]


def _answer(port: int, calls: int) -> Iterator[Finding]:
    """Take calls until all have come or the time is over."""
    callers: list[str] = []
    deadline = time.monotonic() + MEET_SECONDS
    with socket.create_server(("", port), backlog=512) as server:
        while len(callers) < calls and time.monotonic() < deadline:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                call, _ = server.accept()
                with call:
                    call.settimeout(2)
                    if name := call.recv(256).decode():  # `wait_for_head` hangs up without a word
                        call.sendall(f"{time.time():.6f}\n".encode())
                        callers.append(name.strip())
            except OSError:
                continue
    if len(callers) == calls:
        yield Finding("ok", f"all {calls} others called")
    else:
        yield Finding(
            "problem",
            f"{len(callers)} of {calls} others called within {MEET_SECONDS:.0f} s: {', '.join(callers) or 'none'}",
            "a run on these nodes would not start",
            "look at the lines of the others",
        )
