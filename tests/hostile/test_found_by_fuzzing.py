"""What `make fuzz` found, each with its shortest input."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.byte_bpe_training import train_byte_bpe
from data_pipeline.tokenizers.tokenizer import load_tokenizer, tokenizer_files
from data_pipeline.untrusted import in_one_line
from launch.clusters.slurm import read_site
from launch.plan.machine import find_machine
from parallel.errors import LaunchError
from tests.data_pipeline.sets import documents
from train.checkpoint.format.reader import Reader
from train.checkpoint.importing.config_json import read_stated
from train.errors import CheckpointError, ConfigError
from train.health.injected_faults import VARIABLE, FaultInjector
from train.health.lease import Holder, read_lease
from train.records.events import EventLog
from train.records.jsonl import read_backwards, read_jsonl
from train.records.metrics import Metrics
from train.sinks.background import Sinks


def repeat_an_id(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[100:102]
    vocabulary[first] = vocabulary[second]


def match_nothing(content: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"Regex": "a*"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}


@pytest.mark.parametrize("change", [repeat_an_id, match_nothing])
def test_a_tokenizer_with_which_tiktoken_panics_is_encoded_by_the_other_library(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    train_byte_bpe(documents(200), tmp_path, vocab_size=320)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_batch(["the cat"]) == [tokenizer.encode("the cat")]


def test_an_oversized_file_beside_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    train_byte_bpe(documents(200), tmp_path, vocab_size=320)
    os.truncate(tmp_path / "tokenizer_config.json", 1 << 40)
    with pytest.raises(DataError, match=r"tokenizer_config.json cannot be read: .* more than the"):
        tokenizer_files(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_log_that_is_a_link_out_of_the_run_folder_is_not_appended_to(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "private").write_bytes(b"without a line break")
    (tmp_path / "run" / name).symlink_to(tmp_path / "private")
    EventLog(tmp_path / "run" / "events.jsonl")("started", attempt=1)
    metrics = Metrics(tmp_path / "run" / "metrics.jsonl", Sinks(), total_steps=9, log_every=1, enabled=True)
    metrics.write_evaluation(1, {"validation_loss": 1.0})
    metrics.close()
    assert (tmp_path / "private").read_bytes() == b"without a line break"


def test_a_lease_that_is_a_link_to_itself_is_no_lease(tmp_path: Path) -> None:
    (tmp_path / "lease.json").symlink_to("lease.json")
    assert read_lease(tmp_path / "lease.json") == (None, 0)


def test_a_terminal_does_not_obey_the_host_of_a_lease() -> None:
    holder = Holder(**{**vars(Holder.this_process({})), "host": "\x1b[31mred"})
    assert str(holder).isprintable()


def test_a_manifest_that_is_a_link_to_itself_is_a_documented_error(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").symlink_to("manifest.json")
    with pytest.raises((ValueError, OSError), match=r"manifest\.json"):
        Reader(tmp_path)


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\nb", "x" * 100_000])
def test_an_unknown_field_of_config_json_is_shown_printable_and_short(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", name: "y" * 100_000}))
    with pytest.raises(CheckpointError, match="does not know") as refused:
        read_stated(tmp_path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 5000


def test_a_fifo_in_place_of_a_site_file_or_a_machine_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    with pytest.raises(LaunchError, match="FIFO"):
        read_site(tmp_path / "file")
    with pytest.raises(ConfigError, match="FIFO"):
        find_machine("h100", tmp_path / "file")


@pytest.mark.parametrize("text", ["[]", "{", '{"faults": 1}', '{"faults": [{}]}', "[" * 100_000, '{"faults": [1]}'])
def test_a_variable_that_describes_no_faults_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE}.*does not describe faults") as refused:
        FaultInjector({VARIABLE: text}, 0, tmp_path)
    assert str(refused.value).isprintable()


def test_what_a_library_says_is_shown_in_one_printable_line() -> None:
    assert in_one_line(ValueError("found \x1b[31m\0\nin\u202e page " + "x" * 1000)).startswith(
        "found ?[31m? in? page x"
    )
    assert len(in_one_line(ValueError("x" * 1000))) == 300


def test_a_log_that_is_a_terabyte_of_zeros_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n')
    assert [*read_jsonl(path)] == [*read_backwards(path)] == [{"step": 1, "loss": 2.0}]
    os.truncate(path, 1 << 40)
    assert [*read_jsonl(path)] == [{"step": 1, "loss": 2.0}]
    assert [*read_backwards(path)] == []


def test_a_long_line_hides_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"x" * (5 << 20) + b'\n{"step": 2}\n')
    assert [*read_jsonl(path)] == [{"step": 1}, {"step": 2}]
    assert [*read_backwards(path)] == [{"step": 2}, {"step": 1}]


@pytest.mark.parametrize("name", ["nul\x00l", "\r\n"])
def test_the_name_of_a_figure_of_a_machine_ends_no_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "machines.yaml").write_text(json.dumps({"mine": {name: 1}}))
    with pytest.raises(ConfigError) as caught:
        find_machine("mine", tmp_path / "machines.yaml")
    assert str(caught.value).isprintable()
