from pathlib import Path

from data_pipeline.build.cleaning import QUALITY
from data_pipeline.build.options import BuildOptions
from data_pipeline.build.plan import make_plan, plan_hash
from data_pipeline.sources.records import ReadOptions
from tests.data_pipeline.sets import documents, write_jsonl


def test_a_plan_has_the_hash_that_it_had_before_options_were_renamed() -> None:
    """The hash was computed by an earlier version, with `held_out_share` and `data_pipeline.cleaning:quality`."""
    options = BuildOptions(seq_len=32, validation_share=0.1, filters=(QUALITY,))
    content = {
        "options": options.as_json(),
        "tokenizer": {"tokenizer.model": "58fdb66cb033bad8de3c8c0140ad834f"},
        "files": "8805a9460d600fe09e42e66aa7c0437b",
    }
    assert plan_hash(content) == "fa1d6e4207ed1563220e0b0824655dd7"


def test_every_option_and_input_changes_the_hash(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", documents(5))
    plans = [
        make_plan([str(text)], BuildOptions(**options), {"tokenizer.model": name}, 300, 2)  # type: ignore[arg-type]
        for options, name in (
            ({}, "a"),
            ({}, "b"),
            ({"seq_len": 8}, "a"),
            ({"validation_share": 0.1}, "a"),
            ({"filters": (QUALITY,)}, "a"),
            ({"read": ReadOptions(text_key="body")}, "a"),
        )
    ]
    longer = write_jsonl(text, documents(6))
    plans.append(make_plan([str(longer)], BuildOptions(), {"tokenizer.model": "a"}, 300, 2))
    assert len({plan.hash for plan in plans}) == len(plans)
