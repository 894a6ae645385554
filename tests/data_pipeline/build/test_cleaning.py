import pytest

from data_pipeline.build.cleaning import content_hash, empty, load_filter, longer_than, quality, shorter_than
from data_pipeline.errors import DataError

PROSE = {
    "english": "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 3,
    "chinese": "\u9053\u53ef\u9053\u3002\u975e\u5e38\u9053\u3002\u540d\u53ef\u540d\u3002" * 8,
    "code": "def f(x: int) -> int:\n    if x > 0:\n        return f(x - 1) + 1\n    return 0\n",
}


@pytest.mark.parametrize("text", PROSE.values(), ids=PROSE)
def test_good_text_in_any_language_is_kept(text: str) -> None:
    assert quality(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("buy now\n" * 50, "repeated lines"),
        ("\x00\x01\x02 binary" * 20, "control characters"),
        ("0.1 2.3 4.5 | --- === " * 30, "few letters"),
    ],
)
def test_broken_text_is_dropped_with_a_reason(text: str, reason: str) -> None:
    assert quality(text) == reason


def test_lengths_are_limited_in_characters() -> None:
    assert (shorter_than(3)("ab"), shorter_than(3)("abc")) == ("too short", None)
    assert (longer_than(3)("abcd"), longer_than(3)("äöü")) == ("too long", None)
    assert (empty(" \n\t"), empty("a")) == ("empty", None)


def test_only_equal_texts_have_equal_hashes() -> None:
    assert content_hash("one") == content_hash("one")
    assert content_hash("one") != content_hash("one ")


def test_a_filter_is_loaded_by_its_name() -> None:
    assert load_filter("data_pipeline.build.cleaning:quality") is quality


@pytest.mark.parametrize(
    "name", ["nowhere:f", "data_pipeline.build.cleaning:nothing", "data_pipeline.build.cleaning", ":f"]
)
def test_a_filter_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"--filter {name}: .*give it as module:function"):
        load_filter(name)
