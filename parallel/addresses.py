"""By which address and interface other nodes reach this machine.

Debian maps a machine's own name to 127.0.1.1, and `localhost` may be ::1 or 127.0.0.1; so what other nodes must reach
is always told as an address, taken from the network interfaces themselves. Imports no torch.
"""

import ipaddress
import socket

import psutil

from parallel.errors import LaunchError


def address_of(host: str) -> str:
    """The address that a name stands for here. LaunchError if there is none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise LaunchError(
            f"the head {host} is not known on {socket.gethostname()} ({error.strerror}); use an IP address"
        ) from None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def own_addresses() -> dict[str, str]:
    """This machine's addresses and the interface of each, loopback left out."""
    found = {}
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                plain = address.address.partition("%")[0]
                if not is_loopback(plain):
                    found[plain] = interface
    return found


def head_here(host: str) -> str:
    """On the head node: the address of its own at which the others reach it."""
    address, own = address_of(host), own_addresses()
    if address in own:
        return address
    usable = [a for a in own if not ipaddress.ip_address(a).is_link_local]
    if is_loopback(address) and len(usable) == 1:
        return usable[0]
    raise LaunchError(
        f"the head {host} is {address} on this machine ({socket.gethostname()}), which other nodes cannot reach here; "
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
            raise LaunchError(f"no way from {socket.gethostname()} to the head {host}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def reached_at(host: str, port: int, is_head: bool) -> tuple[str, str]:
    """The address and the interface by which the other nodes reach this machine, given how they name the head.

    LaunchError if they cannot be told."""
    address = head_here(host) if is_head else address_towards(host, port)
    interface = own_addresses().get(address)
    if interface is None:
        raise LaunchError(
            f"no network interface of {socket.gethostname()} has the address {address}, from which the head {host} is "
            "reached; check the head's address"
        )
    return address, interface
