"""A minimal endpoint of OpenAI's completions, to look at a model: /health, /v1/models and /v1/completions.

Requests are computed one after the other, since they share the cores. A client that goes away stops its request at the
next token. There is no authentication, and no chat.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_pipeline.untrusted import in_one_line, parse_json
from train.errors import ConfigError
from train.generation import complete as completing
from train.generation.complete import Completion, complete
from train.generation.open_model import Opened
from train.generation.request_limits import RequestLimits, error_document
from train.generation.sampling import Sampling

Stop = str | list[str] | None


class CompletionRequest(BaseModel):
    """The body of a request for completions. A member that is not here is refused, and so is a wrong value."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    prompt: str = Field(min_length=1)
    max_tokens: int = Field(default=16, ge=1, le=1 << 16)
    n: int = Field(default=1, ge=1, le=8)
    """Texts for the prompt. Text i has the seed `seed` + i."""
    temperature: float = Field(default=1.0, ge=0, le=1000)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """Not of OpenAI, as the next two; 0: all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 16)
    stop: Stop = Field(default=None, max_length=64)
    stream: bool = False
    user: str | None = None
    """Changes nothing."""

    def settings(self) -> completing.Request:
        """The request as generation takes it. Without a seed, a new one is drawn."""
        sampling = Sampling(self.temperature, self.top_k or None, self.top_p, self.min_p, self.repetition_penalty)
        first = secrets.randbits(32) if self.seed is None else self.seed
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seeds = [first + number for number in range(self.n)]
        return completing.Request([self.prompt] * self.n, self.max_tokens, sampling, seeds, stops)


class Server:
    """Serves one model under one name."""

    def __init__(self, opened: Opened, name: str) -> None:
        self._opened, self._name, self._created = opened, name, int(time.time())
        self._lock = asyncio.Lock()

    async def health(self) -> Response:
        """Tell that the server answers."""
        return JSONResponse({"status": "ok"})

    async def models(self) -> Response:
        """List the model."""
        model = {"id": self._name, "object": "model", "created": self._created, "owned_by": "keepstep"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        """Complete a prompt: one document, or a stream of events."""
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return JSONResponse(error_document("the content type must be application/json"), 415)
        try:
            asked = CompletionRequest.model_validate(parse_json(await request.body()))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return JSONResponse(error_document(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"), 400)
        except ValueError as error:
            return JSONResponse(error_document(f"the body is not JSON: {in_one_line(error)}"), 400)
        if asked.model != self._name:
            return JSONResponse(error_document(f"there is no model {asked.model[:200]!r}, only {self._name!r}"), 404)
        try:
            completion = complete(self._opened, asked.settings())
        except ConfigError as error:
            return JSONResponse(error_document(str(error)), 400)
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
        head["model"] = self._name
        if asked.stream:
            return StreamingResponse(self._events(completion, head), media_type="text/event-stream")
        return await self._document(completion, head, request)

    async def _document(self, completion: Completion, head: dict[str, Any], request: Request) -> Response:
        async for _ in self._steps(completion):
            if await request.is_disconnected():
                return Response(status_code=499)
        choices = [_choice(row, text.text, text.finish) for row, text in enumerate(completion.rows)]
        made = sum(len(text.tokens) for text in completion.rows)
        prompt = completion.prompt_tokens[0]
        usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return JSONResponse({**head, "choices": choices, "usage": usage})

    async def _events(self, completion: Completion, head: dict[str, Any]) -> AsyncIterator[str]:
        async for new in self._steps(completion):
            choices = [_choice(row, text, completion.rows[row].finish) for row, text in new.items()]
            if shown := [choice for choice in choices if choice["text"] or choice["finish_reason"]]:
                yield f"data: {json.dumps({**head, 'choices': shown})}\n\n"
        yield "data: [DONE]\n\n"

    async def _steps(self, completion: Completion) -> AsyncIterator[dict[int, str]]:
        """The steps of a completion, computed in another thread, while no other request is computed."""
        async with self._lock:
            while (new := await to_thread.run_sync(next, completion.steps, None)) is not None:
                yield new


def _choice(row: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": row, "text": text, "logprobs": None, "finish_reason": finish}


def build_app(opened: Opened, name: str, hosts: Collection[str] | None) -> FastAPI:
    """The application. Without pages of its own: those would load scripts from elsewhere."""
    server = Server(opened, name)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestLimits, hosts=hosts)
    app.get("/health")(server.health)
    app.get("/v1/models")(server.models)
    app.post("/v1/completions")(server.completions)
    return app
