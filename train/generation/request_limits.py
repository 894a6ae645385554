"""Refuses HTTP requests that are too large or meant for another host, before anything reads them. ASGI middleware."""

import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

MAX_BODY = 1 << 20
"""Bytes of a request's body, at most."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequestLimits:
    """Passes a request on if its body is small and its Host header names one of `hosts` (None: any host).

    A web page that a browser shows can make requests to this machine under a name of its own (DNS rebinding); such a
    name is not among the hosts."""

    def __init__(self, app: App, hosts: Collection[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._hosts is not None and _host_of(scope) not in self._hosts:
            await _refuse(send, 403, f"the Host header must be one of {', '.join(sorted(self._hosts))}")
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > MAX_BODY:
                await _refuse(send, 413, f"the request has more than {MAX_BODY} bytes")
                return
            if not message.get("more_body", False):
                break
        waiting: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)


def error_document(message: str) -> dict[str, Any]:
    """An error in the form of OpenAI's API."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def _host_of(scope: Message) -> str | None:
    value = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
    try:
        return urlsplit(f"//{value}").hostname
    except ValueError:
        return None


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps(error_document(message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
