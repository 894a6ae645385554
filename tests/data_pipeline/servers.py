"""HTTP servers on loopback for the tests: a plain one that misbehaves as told, and moto's S3."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Faults:
    """What the server does wrong, and what it was asked for."""

    seconds_late: float = 0.0
    errors: int = 0
    """Answers of 503 that are still to be given."""
    cuts: int = 0
    """Answers that are still to be cut in the middle."""
    short: int = 0
    """Answers that are still to be well-formed, but a byte too short."""
    flips: int = 0
    """Answers with one bit wrong."""
    only: str = ".shard"
    """Faults hit requests of paths with this in them."""
    requests: list[str] = field(default_factory=list)
    """Path and range of each."""
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, name: str) -> bool:
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
            self.faults.at_once += 1
            self.faults.most_at_once = max(self.faults.most_at_once, self.faults.at_once)
        try:
            self._answer(with_body=True)
        finally:
            with self.faults.lock:
                self.faults.at_once -= 1

    def _answer(self, with_body: bool) -> None:
        faults, path = self.faults, self.root / self.path.lstrip("/")
        wrong = faults.only in self.path
        faults.requests.append(f"{self.path} {self.headers.get('Range', '')}")
        time.sleep(faults.seconds_late)
        if wrong and faults.take("errors"):
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
        if wrong and faults.take("short"):
            data = data[:-1]
        if wrong and faults.take("flips"):
            data = bytes([data[0] ^ 1]) + data[1:]
        self._head(206 if asked else 200, len(data), f"bytes {begin}-{begin + len(data) - 1}/{size}" if asked else None)
        if not with_body:
            return None
        if wrong and faults.take("cuts"):
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
        pass  # the client went away, or we cut it off


@contextmanager
def http_server(root: Path) -> Iterator[tuple[str, Faults]]:
    """Serves the files below `root`. Gives its address and what it does wrong."""
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
