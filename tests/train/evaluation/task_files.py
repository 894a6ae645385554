"""Small tasks of lm-evaluation-harness in a folder: choices, texts, greedy continuations and generated ones."""

import json
from pathlib import Path
from typing import Any

import yaml

TEXTS = [
    "def train(run):\n    return run.step",
    "import logging\n\nlog = logging.getLogger(__name__)\n",
    "for step in range(10): losses.append(step)",
    "the learning rate follows the step",
]


def write_tasks(folder: Path) -> Path:
    """Write a folder with four tasks, one for each kind of request; returns it."""
    folder.mkdir()
    choices = [{"question": text[:12], "choices": [text[12:20], " zzz", "return"]} for text in TEXTS]
    texts = [{"text": text * (3 if number == 0 else 1)} for number, text in enumerate(TEXTS)]
    pairs = [{"start": text[:8], "end": text[8:12]} for text in TEXTS]
    _write(folder, "choice", choices, output_type="multiple_choice", doc_to_text="{{question}}",
           doc_to_choice="{{choices}}", doc_to_target=0, metric_list=_metrics("acc", "acc_norm"))  # fmt: skip
    _write(folder, "perplexity", texts, output_type="loglikelihood_rolling", doc_to_text="",
           doc_to_target="{{text}}", metric_list=_metrics("bits_per_byte", "word_perplexity"))  # fmt: skip
    _write(folder, "greedy", pairs, output_type="loglikelihood", doc_to_text="{{start}}", doc_to_target="{{end}}",
           metric_list=_metrics("perplexity", "acc"))  # fmt: skip
    _write(folder, "generate", pairs, output_type="generate_until", doc_to_text="{{start}}", doc_to_target="{{end}}",
           generation_kwargs={"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False},
           metric_list=_metrics("exact_match"))  # fmt: skip
    return folder


def _metrics(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name} for name in names]


def _write(folder: Path, name: str, documents: list[Any], **settings: Any) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **settings}))
