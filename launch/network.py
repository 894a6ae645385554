"""Where the nodes of one run meet: the head's address and port, and this machine's own address and interface.

Debian maps a machine's own name to 127.0.1.1, and `localhost` may be ::1 or 127.0.0.1; so what other nodes must reach
is always told as an address, taken from the network interfaces themselves.
"""

import ipaddress
import socket
import time

import psutil

from parallel.errors import LaunchError


def parse_endpoint(text: str) -> tuple[str, int]:
    """`host:port`, with IPv6 literals in brackets: `[fe80::1]:29400`."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise LaunchError(f"--head {text}: write an IPv6 address in brackets, such as [{host}]:{port}")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise LaunchError(f"--head {text} must read HOST:PORT, such as 10.0.0.7:29400")
    return host, int(port)


def endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(host: str) -> str:
    """The address that a name stands for here. LaunchError if there is none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise LaunchError(
            f"--head {host} is not known on {socket.gethostname()} ({error.strerror}); use an IP address"
        ) from None


def own_addresses() -> dict[str, str]:
    """This machine's addresses and the interface of each, loopback left out."""
    found = {}
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                plain = address.address.partition("%")[0]
                if not ipaddress.ip_address(plain).is_loopback:
                    found[plain] = interface
    return found


def head_here(host: str) -> str:
    """On the head node: the address of its own at which the others reach it."""
    address, own = address_of(host), own_addresses()
    if address in own:
        return address
    usable = [a for a in own if not ipaddress.ip_address(a).is_link_local]
    if ipaddress.ip_address(address).is_loopback and len(usable) == 1:
        return usable[0]
    raise LaunchError(
        f"--head {host} is {address} on this machine ({socket.gethostname()}), which other nodes cannot reach here; "
        f"use one of its own addresses: {', '.join(usable) or 'it has none'}"
    )


def address_towards(host: str, port: int) -> str:
    """On another node: the address from which packets to the head leave. Sends nothing."""
    address = address_of(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise LaunchError(f"no way from {socket.gethostname()} to --head {host}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def check_free(port: int) -> None:
    """LaunchError if something listens on the port of this machine, the head."""
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} of this machine ({socket.gethostname()}), where node 0 must listen, is taken "
                f"({error.strerror}); choose another with --head HOST:PORT on all nodes"
            ) from None


def wait_for_head(host: str, port: int, wait_seconds: float) -> None:
    """Until node 0 listens; says every 10 s that it waits. LaunchError after `wait_seconds`."""
    start = said = time.monotonic()
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
        if now - said > 10:
            said = now
            print(f"keepstep: waiting for node 0 at {endpoint(host, port)} ({reason})", flush=True)
        time.sleep(0.3)
