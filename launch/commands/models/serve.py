"""`keepstep serve`: an endpoint of OpenAI's completions for one model, to look at it."""

import argparse
import importlib.util
import ipaddress
import signal
import socket
from pathlib import Path
from types import FrameType

from launch.commands.models.generate import RUN_HELP
from launch.numbers import whole
from launch.terminal import add_average_option
from train.errors import ConfigError

WAITING = 64
"""Connections at a time. More are answered with status 503."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep serve`."""
    parser.epilog = "example: keepstep serve runs/laptop --port 8000"
    parser.add_argument("run", type=Path, help=RUN_HELP)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine alone); clients are not authenticated",
    )
    parser.add_argument(
        "--port", type=whole("--port", 0, 65535), default=8000, help="port; 0 takes a free one (default: 8000)"
    )
    parser.add_argument("--name", help="name of the model for clients (default: the name of the folder)")
    add_average_option(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, which end the command with exit code 0."""
    if missing := [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"keepstep serve needs {missing[0]}; install it: pip install 'keepstep[serve]'")
    with _listen(options.host, options.port) as listening:
        _serve(options, listening)
    return 0


def _serve(options: argparse.Namespace, listening: socket.socket) -> None:
    import uvicorn

    from train.generation.open_model import open_model
    from train.generation.server import build_app

    opened, name = open_model(options.run, options.average), options.name or options.run.resolve().name
    hosts = {"127.0.0.1", "::1", "localhost", options.host} if _is_loopback(options.host) else None
    settings = uvicorn.Config(
        build_app(opened, name, hosts),
        log_level="warning",
        access_log=False,
        limit_concurrency=WAITING,
        timeout_graceful_shutdown=1,
        lifespan="off",
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn handles them, then raises them again for these handlers
        signal.signal(number, _return)
    host, port = listening.getsockname()[:2]
    print(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
    uvicorn.Server(settings).run(sockets=[listening])


def _return(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by nothing: the server has stopped, and the command ends."""


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError if the address is not this machine's or the port is taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host ({host}) --port ({port}) cannot be listened on: {error}; choose another port, or --port 0"
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
