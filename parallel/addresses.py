"""The address and the interface at which other nodes reach this machine.

Debian maps a machine's own name to 127.0.1.1, and `localhost` may be ::1 or 127.0.0.1. So names are not enough: other
nodes always get an address, taken from the network interfaces themselves. Imports no torch.
"""

import ipaddress
import socket

import psutil

from parallel.environ import World
from parallel.errors import LaunchError

LOOPBACK = "lo"
"""The interface that only this machine can reach."""
BACKLOG = 4096
"""Connections that wait to be accepted: at the start all ranks connect at once."""


def address_of(host: str) -> str:
    """The address of a host name, as this machine resolves it. Raises LaunchError if it cannot."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise LaunchError(
            f"{socket.gethostname()} cannot resolve the head node's name {host} ({error.strerror}); use an IP address"
        ) from None


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    return ipaddress.ip_address(address).is_loopback


def own_addresses() -> dict[str, str]:
    """The interface of each address of this machine, except loopback."""
    found: dict[str, str] = {}
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                plain = address.address.partition("%")[0]
                if not is_loopback(plain):
                    found[plain] = interface
    return found


def head_here(host: str) -> str:
    """The address at which other nodes reach the head node, found on the head node itself.

    Raises LaunchError if the host name does not lead to one."""
    address, own = address_of(host), own_addresses()
    if address in own:
        return address
    usable = [a for a in own if not ipaddress.ip_address(a).is_link_local]
    if is_loopback(address) and len(usable) == 1:
        return usable[0]
    raise LaunchError(
        f"the head node {host} resolves to {address} on {socket.gethostname()} itself, where other nodes cannot reach "
        f"it; use one of its own addresses: {', '.join(usable) or 'it has none'}"
    )


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which packets to the head node leave. Sends nothing.

    Raises LaunchError if there is no route."""
    address = address_of(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise LaunchError(
                f"{socket.gethostname()} has no route to the head node {host} ({error.strerror}); check the network, "
                "or use another address of the head node"
            ) from None
        return str(probe.getsockname()[0])


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens at this address of this machine alone, so that no other network reaches it.

    OSError if the port is taken."""
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(BACKLOG)
    except OSError:
        server.close()
        raise
    return server


def reached_at(host: str, port: int, is_head: bool) -> tuple[str, str]:
    """The address and the interface at which other nodes reach this machine. `host` is how they name the head node.

    Raises LaunchError if they cannot be found."""
    address = head_here(host) if is_head else address_towards(host, port)
    interface = own_addresses().get(address)
    if interface is None:
        raise LaunchError(
            f"no network interface of {socket.gethostname()} has the address {address}, from which it reaches the head "
            f"node {host}; check the head node's address"
        )
    return address, interface


def on_one_machine(world: World) -> bool:
    """Whether no rank is on another machine. The name `localhost` alone does not say so: Kubernetes operators give it
    to the first of several pods."""
    return world.world_size == world.local_world_size or world.head in ("127.0.0.1", "::1")


def meeting_point(world: World) -> tuple[str, bool]:
    """The address at which the ranks find rank 0, and whether rank 0 can listen there and nowhere else."""
    if on_one_machine(world):
        return "::1" if world.head == "::1" else "127.0.0.1", True
    address = address_of(world.head)
    if not is_loopback(address) and address not in own_addresses():
        return world.head, False
    try:
        return head_here(world.head), True  # a name of this machine may mean 127.0.1.1 here, but not elsewhere
    except LaunchError:
        return world.head, False
