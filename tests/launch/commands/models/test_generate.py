"""`keepstep generate` continues prompts of a run, a checkpoint and an exported folder, as transformers would."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_pipeline.tokenizers.tokenizer import load_tokenizer
from launch.cli import main

STYLES = ("grouped", "tied-qk-norm", "gpt2")
PROMPTS = ["the cat", "a", "the dog sat on the mat; the"]


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("style", STYLES)
def test_greedy_text_is_that_of_transformers_from_run_and_export_one_by_one_and_in_a_batch(
    style: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = runs / f"{style}-exported"
    model: Any = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    capsys.readouterr()
    greedy = ["--temperature", "0", "--tokens", "20"]
    arguments = ["generate", str(exported), "--prompts", str(tmp_path / "prompts.jsonl"), *greedy]
    assert main([*arguments, "--out", str(tmp_path / "texts.jsonl")]) == 0
    texts = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        theirs = model.generate(**ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, ids.input_ids.shape[1] :]
        expected = [token for token in theirs.tolist() if token != tokenizer.eos_token_id]
        ours = document(capsys, str(runs / style), "--prompt", prompt, *greedy)
        assert ours["tokens"] == expected == text["tokens"]
        assert len(set(expected)) > 3, "the model must not repeat one token"
        assert text["prompt"] == prompt


def test_penalized_greedy_text_is_that_of_transformers(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported = runs / "grouped-exported"
    model: Any = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("the cat", return_tensors="pt")
    options = {"max_new_tokens": 20, "do_sample": False, "repetition_penalty": 1.5, "pad_token_id": 0}
    theirs = model.generate(**ids, **options)[0, ids.input_ids.shape[1] :].tolist()
    capsys.readouterr()
    arguments = [str(exported), "--prompt", "the cat", "--tokens", "20", "--temperature", "0"]
    ours = document(capsys, *arguments, "--repetition-penalty", "1.5")
    assert ours["tokens"] == [token for token in theirs if token != tokenizer.eos_token_id]
    assert ours["tokens"] != document(capsys, *arguments)["tokens"]


def test_a_seed_repeats_a_text_and_another_changes_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(runs / "grouped"), "--prompt", "the cat", "--tokens", "12"]
    first = document(capsys, *arguments, "--seed", "4")
    assert first == document(capsys, *arguments, "--seed", "4")
    assert first["tokens"] != document(capsys, *arguments, "--seed", "5")["tokens"]
    positions = len(load_tokenizer(runs / "tokenizer").encode("the cat")) + 12
    layers, kv_heads, head_width, bytes_of_a_number = 2, 2, 8, 4
    assert first["cache_bytes"] == 2 * layers * positions * kv_heads * head_width * bytes_of_a_number


def test_the_text_is_printed_as_it_grows_and_ends_before_a_stop_string(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(runs / "grouped"), "--prompt", "the cat", "--tokens", "20", "--temperature", "0"]
    whole = document(capsys, *arguments)["text"]
    writes: list[str] = []
    true_write = sys.stdout.write
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "write", lambda text: writes.append(text) or true_write(text))
        assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == whole + "\n"
    assert len([part for part in writes if part]) > 5
    stop = whole[len("the cat") + 6 : len("the cat") + 9]
    cut = whole[: len("the cat") + whole[len("the cat") :].index(stop)]
    stopped = document(capsys, *arguments, "--stop", "not in the text", "--stop", stop)
    assert (stopped["text"], stopped["finish"]) == (cut, "stop")
    assert document(capsys, *arguments)["finish"] == "length"


def test_the_line_of_a_result_keeps_the_fields_of_its_prompt(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the", "id": 7}\n\n{"prompt": "dog"}\n')
    arguments = ["--prompts", str(tmp_path / "prompts.jsonl"), "--tokens", "3", "--batch-size", "1"]
    assert main(["generate", str(runs / "gpt2"), *arguments]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["id"], first["prompt"], second["prompt"]) == (7, "the", "dog")
    assert len(second["tokens"]) == 3
    assert second["finish"] == "length"


BAD = {
    "--temperature": ("-1", "--temperature (-1) must be a number from 0 to 1000"),
    "--top-k": ("-1", "--top-k (-1) must be at least 0"),
    "--top-p": ("1.1", "--top-p (1.1) must be a number from 0 to 1"),
    "--min-p": ("nan", "--min-p (nan) must be a number from 0 to 1"),
    "--repetition-penalty": ("0", "--repetition-penalty (0) must be a number from 0.01 to 100"),
    "--seed": ("x", "--seed (x) must be a whole number"),
    "--tokens": ("0", "--tokens (0) must be at least 1"),
    "--batch-size": ("0", "--batch-size (0) must be at least 1"),
    "--stop": ("", "--stop is empty"),
    "--out": ("x", "--out (x) is for --prompts"),
    "--prompts": ("x", "give one of --prompt TEXT and --prompts FILE"),
}


@pytest.mark.parametrize("option", BAD)
def test_a_bad_value_is_refused_in_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, message = BAD[option]
    assert main(["generate", "no-run", "--prompt", "x", option, value]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt": ', ":2 is not JSON"),
        ('["a"]', ':1 has no text "prompt"'),
        ('{"prompt": ""}', ':1 has no text "prompt"'),
        ('{"prompt": "\\ud800"}', ":1 is not JSON"),
    ],
)
def test_a_bad_file_of_prompts_is_refused_before_the_model_is_read(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    assert main(["generate", "no-run", "--prompts", str(file), "--out", str(tmp_path / "out")]) == 2
    assert message in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_failed_batch_leaves_no_file(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the"}\n')
    (tmp_path / "texts").mkdir()
    arguments = ["generate", str(runs / "gpt2"), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert main([*arguments, "--out", str(tmp_path / "missing" / "out")]) == 2
    monkeypatch.setattr("train.generation.prompt_file.Path.rename", lambda *_: (_ for _ in ()).throw(OSError(28, "")))
    assert main([*arguments, "--out", str(tmp_path / "texts" / "out")]) == 1
    assert list((tmp_path / "texts").iterdir()) == []
    assert "no space is left" in capsys.readouterr().err


def test_a_folder_of_hugging_face_that_cannot_be_used_is_refused_in_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = runs / "grouped-exported"
    for change in ("architecture", "weights", "average"):
        copy = tmp_path / change
        copy.mkdir()
        for file in exported.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        if change == "architecture":
            config = json.loads((copy / "config.json").read_text())
            (copy / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
        elif change == "weights":
            (copy / "model.safetensors").write_bytes((exported / "model.safetensors").read_bytes()[:-4])
        options = ["--average"] if change == "average" else []
        capsys.readouterr()
        assert main(["generate", str(copy), "--prompt", "x", *options]) == 2
        error = capsys.readouterr().err
        expected = {"architecture": "'mamba'", "weights": "cannot be read as", "average": "which has one set"}
        assert expected[change] in error
        assert error.count("\n") == 1
