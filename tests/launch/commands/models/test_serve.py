"""`keepstep serve` answers OpenAI's client, refuses what it does not do, and ends at a signal."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI

from launch.cli import main
from train.generation.request_limits import MAX_BODY

SECONDS = 600


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[str]:
    """The address of a server of the run `grouped`, which is ended by SIGTERM."""
    command = [sys.executable, "-m", "launch.cli", "serve", str(runs / "grouped"), "--port", "0"]
    root = Path(__file__).parents[4]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving grouped at http://127.0.0.1:"), line
    yield line.split(" at ")[1].strip()
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0
    process.stdout.close()


@pytest.fixture
def client(served: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=served, api_key="none", max_retries=0, timeout=SECONDS) as made:
        yield made


def generated(runs: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The continuation of "the cat" by `keepstep generate`."""
    capsys.readouterr()
    assert main(["generate", str(runs / "grouped"), "--prompt", "the cat", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)["text"].removeprefix("the cat")


def test_the_client_gets_the_text_of_generate_whole_and_streamed(
    client: OpenAI, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = generated(runs, capsys, "--temperature", "0", "--tokens", "20")
    asked: dict[str, Any] = {"model": "grouped", "prompt": "the cat", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "length")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    parts = [event.choices[0] for event in client.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == expected
    assert len(parts) > 5
    assert parts[-1].finish_reason == "length"


def test_a_seed_repeats_the_text_of_generate_and_n_texts_have_seeds_in_turn(
    client: OpenAI, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"min_p": 0.01, "top_k": 30}
    asked: dict[str, Any] = {"model": "grouped", "prompt": "the cat", "max_tokens": 12, "top_p": 0.9}
    found = client.completions.create(**asked, seed=4, n=2, extra_body=settings)
    options = ["--tokens", "12", "--temperature", "1", "--top-p", "0.9", "--min-p", "0.01", "--top-k", "30"]
    expected = [generated(runs, capsys, *options, "--seed", seed) for seed in ("4", "5")]
    assert [choice.text for choice in found.choices] == expected
    assert expected[0] != expected[1]


def test_a_stop_string_ends_the_text(client: OpenAI, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = generated(runs, capsys, "--temperature", "0", "--tokens", "20")
    stop = whole[6:9]
    found = client.completions.create(
        model="grouped", prompt="the cat", max_tokens=20, temperature=0, stop=["nowhere", stop]
    )
    assert (found.choices[0].text, found.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def test_the_model_is_listed_and_the_server_is_healthy(client: OpenAI, served: str) -> None:
    assert [model.id for model in client.models.list()] == ["grouped"]
    assert httpx.get(served.removesuffix("/v1") + "/health", timeout=SECONDS).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "other"}, 404, "there is no model 'other', only 'grouped'"),
        ({"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ({"max_tokens": 0}, 400, "max_tokens: "),
        ({"n": 100}, 400, "n: "),
        ({"prompt": ""}, 400, "prompt: "),
        ({"prompt": [1, 2]}, 400, "prompt: "),
        ({"logprobs": 3}, 400, "logprobs: Extra inputs are not permitted"),
        ({"prompt": "x" * MAX_BODY}, 413, f"more than {MAX_BODY} bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_request_that_is_not_served_is_refused_in_the_form_of_openai(
    change: dict[str, Any], status: int, message: str, client: OpenAI
) -> None:
    asked = {"model": "grouped", "prompt": "the cat", "max_tokens": 2} | change
    with pytest.raises(APIStatusError) as caught:
        client.completions.create(**asked)
    assert caught.value.status_code == status
    assert message in caught.value.message


def test_a_web_page_and_a_large_or_broken_request_reach_nothing(served: str) -> None:
    url, body = f"{served}/completions", json.dumps({"model": "grouped", "prompt": "x", "max_tokens": 1}).encode()
    json_type = {"content-type": "application/json"}

    def post(content: bytes | Iterator[bytes], headers: dict[str, str]) -> httpx.Response:
        return httpx.post(url, content=content, headers=headers, timeout=SECONDS)

    assert post(body, json_type).status_code == 200
    assert post(body, json_type | {"host": "evil.example"}).status_code == 403  # DNS rebinding
    assert post(body, {"content-type": "text/plain"}).status_code == 415  # what a form of a page may send
    assert post((b"x" * 65536 for _ in range(17)), json_type).status_code == 413  # no length told before
    assert post(b"[" * 100_000, json_type).status_code == 400
    assert "access-control-allow-origin" not in post(body, json_type | {"origin": "http://evil.example"}).headers
    for page in ("docs", "openapi.json"):
        assert httpx.get(served.removesuffix("v1") + page, timeout=SECONDS).status_code == 404


def test_a_client_that_goes_away_leaves_the_server_to_the_others(client: OpenAI, served: str) -> None:
    long = {"model": "grouped", "prompt": "the cat", "max_tokens": 1 << 16, "n": 8, "stream": True}
    # All of it would take longer than the client waits for the next text.
    with httpx.stream("POST", f"{served}/completions", json=long, timeout=SECONDS) as response:
        assert next(response.iter_lines()).startswith("data: ")
    assert client.completions.create(model="grouped", prompt="the", max_tokens=1).choices[0].text is not None


def test_a_port_that_is_taken_and_a_folder_without_a_model_are_refused_in_one_line(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = served.rsplit(":", 1)[1].removesuffix("/v1")
    assert main(["serve", "no-run", "--port", port]) == 2
    assert "cannot be listened on" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "has no checkpoint" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert main(["serve", "no-run", "--port", "65536"]) == 2


def test_without_its_libraries_the_command_names_the_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve", "no-run"]) == 2
    assert "pip install 'keepstep[serve]'" in capsys.readouterr().err
