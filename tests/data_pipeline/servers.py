"""An HTTP server on loopback that serves files and injects faults."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Faults:
    """The faults to inject, and the requests received."""

    delay_seconds: float = 0.0
    """Delay of each answer."""
    together: threading.Barrier | None = None
    """Requests that wait here for each other before any of them gets an answer."""
    errors: int = 0
    """Number of answers that will have status 503."""
    cuts: int = 0
    """Number of answers whose connection will be closed in the middle."""
    short: int = 0
    """Number of answers that will be well-formed, but a byte too short."""
    flips: int = 0
    """Number of answers that will have one wrong bit."""
    only: str = ".shard"
    """Faults affect only paths that contain this."""
    authorization: str = ""
    """The header `Authorization` that each request must have; empty: none."""
    requests: list[str] = field(default_factory=list)
    """Path and range of each request."""
    parallel: int = 0
    """Requests in progress."""
    most_parallel: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, name: str) -> bool:
        """Whether this answer gets the fault; if so, one fewer remains."""
        with self.lock:
            left = getattr(self, name)
            if left:
                setattr(self, name, left - 1)
            return left > 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    faults: Faults

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        with self.faults.lock:
            self.faults.parallel += 1
            self.faults.most_parallel = max(self.faults.most_parallel, self.faults.parallel)
        try:
            self._answer(with_body=True)
        finally:
            with self.faults.lock:
                self.faults.parallel -= 1

    def _answer(self, with_body: bool) -> None:
        faults, path = self.faults, self.root / self.path.lstrip("/")
        affected = faults.only in self.path
        faults.requests.append(f"{self.path} {self.headers.get('Range', '')}")
        time.sleep(faults.delay_seconds)
        if faults.together is not None:
            faults.together.wait(timeout=600)
        if faults.authorization not in ("", self.headers.get("Authorization")):
            return self._head(401, 0)
        if affected and faults.take("errors"):
            return self._head(503, 0)
        if not path.is_file():
            return self._head(404, 0)
        data = path.read_bytes()
        size = len(data)
        asked = self.headers.get("Range")
        begin = 0
        if asked:
            start, _, end = asked.removeprefix("bytes=").partition("-")
            begin = int(start)
            data = data[begin : int(end) + 1 if end else None]
        if affected and faults.take("short"):
            data = data[:-1]
        if affected and faults.take("flips"):
            data = bytes([data[0] ^ 1]) + data[1:]
        self._head(206 if asked else 200, len(data), f"bytes {begin}-{begin + len(data) - 1}/{size}" if asked else None)
        if not with_body:
            return None
        if affected and faults.take("cuts"):
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
            return None
        self.wfile.write(data)
        return None

    def _head(self, status: int, length: int, content_range: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client disconnected, or the server cut the connection


@contextmanager
def http_server(root: Path) -> Iterator[tuple[str, Faults]]:
    """Serves the files below `root`. Yields its address and its faults."""
    faults = Faults()
    handler = type("Handler", (_Handler,), {"root": root, "faults": faults})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", faults
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
