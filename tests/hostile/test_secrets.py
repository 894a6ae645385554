"""A password is never written or printed: addresses name the environment variable that holds it."""

import base64
import json
import logging
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.credentials import (
    RedactingFormatter,
    check_address,
    expand_outside_credentials,
    redact,
    redact_all,
    with_credentials,
    without_credentials,
)
from data_pipeline.shards.dataset import DataSet
from data_pipeline.sources.files import open_input
from data_pipeline.sources.inputs import list_inputs
from data_pipeline.stream.saved_state import describe
from launch import cli
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.servers import http_server
from train.checkpoint.stores.open import open_root
from train.config_file import load_recipe, resolved_recipe
from train.errors import CheckpointError
from train.records.events import EventLog

LAPTOP = Path(__file__).parents[2] / "recipes" / "laptop.yaml"
SECRET = "s3cret"
SPECIAL = "s3cret:/@?%20"
WITH_PASSWORD = [
    (f"https://me:{SECRET}@host/data", "https://me:***@host/data"),
    (f"https://{SECRET}@host/data", "https://***@host/data"),
    (f"https://me:{SECRET}@x@host/data", "https://me:***@host/data"),
    (f"ftp://me:{SECRET}@host", "ftp://me:***@host"),
    (f"filecache::https://me:{SECRET}@host/data", "filecache::https://me:***@host/data"),
    (f"https://host/data?v=3&X-Amz-Signature={SECRET}", "https://host/data?v=3&X-Amz-Signature=***"),
    (f"https://host/?next=https://me:{SECRET}@other/", "https://host/?next=https://me:***@other/"),
]
WITHOUT = [
    "data/main",
    "/shared/a@b:c/d",
    "s3://bucket/part-?.jsonl",
    "sftp://me@host/data",
    "https://host:8000/data@v2?version=3",
    "https://me:$DATA_PASSWORD@host/data",
    "https://${DATA_TOKEN}@host/data?token=${DATA_TOKEN}",
]


@pytest.mark.parametrize(("address", "shown"), WITH_PASSWORD)
def test_a_password_is_removed_from_any_text_and_refused_in_an_address(address: str, shown: str) -> None:
    assert redact(f"cannot read '{address}': 401; \"{address}\"") == f"cannot read '{shown}': 401; \"{shown}\""
    assert redact_all({"a": [address, {"b": address}], "c": 7}) == {"a": [shown, {"b": shown}], "c": 7}
    with pytest.raises(ValueError, match="has a password in it") as caught:
        check_address(address)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("text", WITHOUT)
def test_a_text_without_a_password_stays(text: str) -> None:
    assert redact(text) == check_address(text) == text


@given(st.text())
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    assert redact(redact(text)) == redact(text)


def test_a_variable_is_replaced_only_where_the_address_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PASSWORD", SECRET)
    address = "https://me:$DATA_PASSWORD@host/data"
    assert with_credentials(address) == f"https://me:{SECRET}@host/data"
    assert without_credentials(f"https://me:{SECRET}@host/data/part-1", address) == f"{address}/part-1"
    assert expand_outside_credentials(f"{address}/$PART", lambda text: text.replace("$PART", "1")) == f"{address}/1"
    with pytest.raises(ValueError, match=r"the variable \$NOT_SET of an address is not set"):
        with_credentials("https://me:$NOT_SET@host/data")


@pytest.mark.parametrize(("address", "shown"), WITH_PASSWORD)
def test_a_recipe_refuses_a_password_and_does_not_repeat_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, address: str, shown: str
) -> None:
    for setting in ("data.sources.0.path", "data.sources.0.mirror"):
        for command in (["run", str(LAPTOP)], ["submit", str(LAPTOP), "--dry-run"]):
            assert cli.main([*command, f"{setting}={address}", f"runs_dir={tmp_path}"]) == 2
            shown_text = "".join(capsys.readouterr())
            assert f"{shown} has a password in it" in shown_text
            assert SECRET not in shown_text
    assert list(tmp_path.iterdir()) == []


def test_the_resolved_recipe_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PASSWORD", SECRET)
    address = "https://me:$DATA_PASSWORD@host/data"
    recipe = load_recipe(LAPTOP, [f"data.sources.0.path={address}", "data.sources.0.mirror=s3://b/$DATA_PASSWORD"])
    assert recipe.data.sources[0].path == address
    assert recipe.data.sources[0].mirror == f"s3://b/{SECRET}", "not the place of a password, so it is a part of a path"
    assert address.encode() in resolved_recipe(recipe)


def test_a_password_in_the_text_of_a_recipe_does_not_get_into_a_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"# from https://me:{SECRET}@host/\n{LAPTOP.read_text()}")
    shared = ["runs_dir=/shared/r", "data.sources.0.path=/shared/d"]
    assert cli.main(["kubernetes", str(file), *shared, "--gpus", "0", "--image", "i", "--claim", "c"]) == 2
    told = capsys.readouterr()
    assert "the recipe has a password in an address" in told.err
    assert SECRET not in told.out + told.err


def test_events_and_logs_do_not_repeat_what_libraries_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = f"ClientResponseError(401, url='https://me:{SECRET}@host/\"x\"?sig={SECRET}\\')"
    EventLog(tmp_path / "events.jsonl")("failed", error=said, details={"urls": [said]})
    [event] = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert SECRET not in json.dumps(event)
    try:
        raise OSError(said)
    except OSError:
        logging.getLogger("test").exception("a read failed: %s", said)
    lines = RedactingFormatter().format(caplog.records[-1])
    assert "Traceback" in lines
    assert SECRET not in lines


def test_the_traceback_of_a_bug_has_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert cli.main(["status", str(tmp_path)]) == 2
    try:
        raise RuntimeError(f"cannot connect to https://me:{SECRET}@host")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "https://me:***@host" in told
    assert SECRET not in told.replace("{SECRET}", "")


def test_a_store_of_checkpoints_refuses_a_password() -> None:
    with pytest.raises(CheckpointError, match=r"https://me:\*\*\*@host/runs has a password in it") as caught:
        open_root(f"https://me:{SECRET}@host/runs").steps()
    assert SECRET not in str(caught.value)


def test_a_data_set_behind_a_password_is_read_and_leaves_no_trace_of_it(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_server(built.path) as (server, faults):
        faults.authorization = "Basic " + base64.b64encode(f"me:{SPECIAL}".encode()).decode()
        address = f"http://me:$DATA_PASSWORD@{server.removeprefix('http://')}"
        monkeypatch.setenv("DATA_PASSWORD", SPECIAL)
        dataset = DataSet(address)
        assert dataset.manifest.fingerprint
        assert describe(dataset)["path"] == address
        dataset.close()
        [file] = list_inputs([f"{address}/manifest.json"])
        assert "s3cret" not in str(file)
        with open_input(file.address) as opened:
            assert json.load(opened)
        monkeypatch.delenv("DATA_PASSWORD")
        with pytest.raises(Exception, match=r"the variable \$DATA_PASSWORD of an address is not set"):
            DataSet(address)
