"""Where the nodes of one run meet: the head's port, and waiting for it. Addresses are in `parallel/addresses.py`."""

import socket
import time

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
