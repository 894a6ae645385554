"""Every network card of this machine: InfiniBand and RoCE ports and Ethernet links, for `keepstep doctor`."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from launch.doctor.finding import Finding

SYS = Path("/sys/class")
COUNTERS = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")
"""Counters of a port that show a bad cable or card."""


def card_findings(sys: Path = SYS) -> list[Finding]:
    """Return the findings about all network cards."""
    return [*judge_rdma(rdma_ports(sys)), *judge_ethernet(ethernet_speeds(sys))]


def rdma_ports(sys: Path = SYS) -> dict[str, dict[str, str]]:
    """Return the state, the rate and the error counters of each port, by device and number."""
    found: dict[str, dict[str, str]] = {}
    for port in sorted(sys.glob("infiniband/*/ports/*")):
        values = {name: _read(port / name) for name in ("state", "rate", "link_layer")}
        values |= {name: _read(port / "counters" / name) for name in COUNTERS}
        found[f"{port.parts[-3]}/{port.name}"] = values
    return found


def fastest_port(sys: Path = SYS) -> float:
    """Return the Gbit/s of the fastest active RDMA port; 0 if there is none."""
    return max((_gigabits(port["rate"]) for port in rdma_ports(sys).values() if "ACTIVE" in port["state"]), default=0.0)


def ethernet_speeds(sys: Path = SYS) -> dict[str, int]:
    """Return the speed in Mbit/s of each real Ethernet interface that is up."""
    found: dict[str, int] = {}
    for device in sorted(sys.glob("net/*/device")):  # virtual interfaces have no device
        interface = device.parent
        speed = _read(interface / "speed")
        if _read(interface / "operstate") == "up" and speed.isdecimal():
            found[interface.name] = int(speed)
    return found


def judge_rdma(ports: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield the findings about InfiniBand and RoCE ports."""
    active = {name: _gigabits(port["rate"]) for name, port in ports.items() if "ACTIVE" in port["state"]}
    down = [f"{name} ({port['state'] or 'unknown'})" for name, port in ports.items() if name not in active]
    why = "NCCL uses all ports; without them it takes slower ones, or TCP"
    if ports and not active:
        yield Finding(
            "problem", f"no RDMA port is active: {', '.join(down)}", why, "check cables and the subnet manager"
        )
        return
    if down:
        yield Finding(
            "note", f"RDMA ports that are not active: {', '.join(down)}", why, "check cables, if they are in use"
        )
    fastest = max(active.values(), default=0.0)
    if slow := [f"{name} at {rate:g}" for name, rate in active.items() if rate < fastest]:
        what = f"RDMA ports are slower than {fastest:g} Gbit/s: {', '.join(slow)}"
        yield Finding(
            "note", what, "all wait for the slowest, if they have the same task", "check cables and switch ports"
        )
    for name in active:
        if errors := [f"{counter} {ports[name][counter]}" for counter in COUNTERS if _is_bad(ports[name][counter])]:
            what = f"RDMA port {name} has counted errors since its start: {', '.join(errors)}"
            yield Finding("note", what, "a bad cable slows all ranks", "watch whether they grow; replace the cable")
    if active and not down:
        yield Finding("ok", f"{len(active)} RDMA ports active, the fastest at {fastest:g} Gbit/s")


def judge_ethernet(speeds: Mapping[str, int]) -> Iterator[Finding]:
    """Yield which Ethernet interfaces there are, and how fast. `speeds` in Mbit/s."""
    if speeds:
        listed = ", ".join(f"{name} {speed / 1000:g} Gbit/s" for name, speed in speeds.items())
        yield Finding("ok", f"Ethernet: {listed}")


def _gigabits(rate: str) -> float:
    """Return the Gbit/s of a port's rate, such as `400 Gb/sec (4X NDR)`; 0 if it has none."""
    word = rate.split(" ")[0]
    return float(word) if word.replace(".", "", 1).isdecimal() else 0.0


def _is_bad(counter: str) -> bool:
    return counter.isdecimal() and int(counter) > 0


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
