import math
import re
from collections import defaultdict
from pathlib import Path

import pytest

from train.records.catalogue import METRICS
from train.sinks.prometheus_sink import PrometheusSink, exposition
from train.sinks.sink import tag_of

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SAMPLE = re.compile(rf"({NAME.pattern})\{{(.*)\}} (NaN|[+-]Inf|[-+0-9.e]+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """Returns the samples of a text by the grammar of Prometheus's text format 0.0.4, and fails if it breaks it."""
    samples: Samples = {}
    types: dict[str, str] = {}
    order: dict[str, list[int]] = defaultdict(list)
    assert text.endswith("\n")
    for number, line in enumerate(text.splitlines()):
        if line.startswith("# "):
            keyword, name, rest = line[2:].split(" ", 2)
            assert NAME.fullmatch(name)
            assert rest
            assert keyword in ("HELP", "TYPE")
            if keyword == "TYPE":
                assert rest in ("counter", "gauge")
                assert name not in types, "one TYPE for each name"
                types[name] = rest
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            pairs = [(key, text) for key, text in LABEL.findall(labels)]
            assert LABEL.sub("", labels) == "", line
            assert name in types, "TYPE comes before the first sample"
            assert name.endswith("_total") == (types[name] == "counter")
            assert (name, frozenset(pairs)) not in samples, "a sample comes once"
            samples[name, frozenset(pairs)] = float(value.replace("Inf", "inf"))
            order[name].append(number)
    for name, lines in order.items():
        assert lines == list(range(lines[0], lines[-1] + 1)), f"the samples of {name} stand together"
    return samples


def test_the_text_follows_the_grammar_and_has_base_units() -> None:
    values = {
        "train/loss": 2.5,
        "train/lr": 1e-3,
        "device/memory_gib": 0.5,
        'train/loss/we"b\\': math.nan,
        "train/loss/code": math.inf,
        "validation/loss/code": 1.0,
        "task/copy/acc": 0.25,
        "step": 7.0,
    }
    samples = parsed(exposition("my.run-1", values, {"seconds/step": 3.5, "seconds/data_wait": 0.5}))
    of_run = ("run", "my.run-1")
    assert samples["keepstep_train_loss", frozenset({of_run})] == 2.5
    assert samples["keepstep_train_learning_rate", frozenset({of_run})] == 1e-3
    assert samples["keepstep_device_memory_bytes", frozenset({of_run})] == 2**29
    assert samples["keepstep_train_loss_by_source", frozenset({of_run, ("source", "code")})] == math.inf
    assert math.isnan(samples["keepstep_train_loss_by_source", frozenset({of_run, ("source", r"we\"b\\")})])
    assert samples["keepstep_validation_loss_by_source", frozenset({of_run, ("source", "code")})] == 1.0
    assert samples["keepstep_task_copy_acc", frozenset({of_run})] == 0.25
    assert samples["keepstep_step", frozenset({of_run})] == 7.0
    assert samples["keepstep_seconds_total", frozenset({of_run, ("kind", "step")})] == 3.5


def test_every_metric_has_a_name_of_its_own() -> None:
    values = {tag_of(name): 1.0 for name in METRICS if name not in ("time", "step", "seconds")}
    assert len(parsed(exposition("run", values, {}))) == len(values)


def test_the_file_is_replaced_whole_and_removed_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "collector"
    sink = PrometheusSink(folder, "run", every_seconds=0)
    for step in (1, 2, 3):
        sink.log(step, {"train/loss": 5.0 - step, "seconds/step": 0.5})
        samples = parsed((folder / "keepstep-run.prom").read_text())
        assert samples["keepstep_step", frozenset({("run", "run")})] == step
        assert samples["keepstep_seconds_total", frozenset({("run", "run"), ("kind", "step")})] == step * 0.5
        assert [path.name for path in folder.iterdir()] == ["keepstep-run.prom"]
    sink.log(3, {"validation/loss": 4.0})
    samples = parsed((folder / "keepstep-run.prom").read_text())
    assert samples["keepstep_train_loss", frozenset({("run", "run")})] == 2.0, "the newest value of each stays"
    sink.close()
    assert list(folder.iterdir()) == []


def test_the_file_is_written_every_few_seconds_only(tmp_path: Path) -> None:
    sink = PrometheusSink(tmp_path, "run", every_seconds=1e9)
    sink.log(1, {"train/loss": 5.0})
    sink.log(2, {"train/loss": 4.0})
    samples = parsed((tmp_path / "keepstep-run.prom").read_text())
    assert samples["keepstep_step", frozenset({("run", "run")})] == 1


@pytest.mark.parametrize("text", ['a{b="c"} 1', "# TYPE a gauge\na{} x\n", "# TYPE a gauge\na{b=c} 1\n"])
def test_the_parser_of_this_test_refuses_other_texts(text: str) -> None:
    with pytest.raises(AssertionError):
        parsed(text)
