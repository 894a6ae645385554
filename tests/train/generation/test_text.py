"""The parts of a streamed text make up the text, and no part shows what a stop string takes away."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from data_pipeline.tokenizers.tokenizer import Tokenizer, load_tokenizer
from train.generation.text import Continuation

TEXTS = ["the cat sat on the mat; the dog sat on the log\n", "Grüße, 東京 😀 and e\u0301\n"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_sentencepiece(TEXTS * 50, folder, vocab_size=300)
    return load_tokenizer(folder)


def stream(tokenizer: Tokenizer, prompt: str, tokens: Sequence[int], stops: Sequence[str]) -> Continuation:
    """Feed the tokens; checks that what is shown is always a beginning of the final text."""
    row = Continuation(tokenizer, tokenizer.encode(prompt), stops)
    shown = ""
    for token in tokens:
        if row.finish is None:
            shown += row.add(token)
    if row.finish is None:
        shown += row.end("length")
    assert shown == row.text
    return row


@given(
    text=st.text(alphabet="the cat sat, Grüß東京😀\n", min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="the ca京", min_size=1, max_size=4), max_size=3),
)
def test_the_parts_make_up_the_text_up_to_the_first_stop(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    prompt = "the dog "
    tokens = tokenizer.encode(prompt + text)[len(tokenizer.encode(prompt)) :]
    whole = tokenizer.decode([*tokenizer.encode(prompt), *tokens])[len(tokenizer.decode(tokenizer.encode(prompt))) :]
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    row = stream(tokenizer, prompt, tokens, stops)
    assert row.finish == ("stop" if found else "length")
    if not found:
        assert row.text == whole
    else:  # a later token may complete an earlier stop string, but the first one that was whole ended the text
        assert row.text in {whole[:at] for at in found}


def test_bytes_of_a_character_are_shown_when_it_is_whole(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("龍")  # not in the training text: three tokens of bytes
    row = Continuation(tokenizer, tokenizer.encode("the"), [])
    shown = [row.add(token) for token in tokens]
    assert len(tokens) >= 3
    assert "\ufffd" not in "".join(shown)
    assert shown[-1] == "龍"


def test_a_begun_stop_string_is_held_back_until_it_is_none(tokenizer: Tokenizer) -> None:
    row = Continuation(tokenizer, tokenizer.encode("the"), [" cat sat"])
    cat, sat = tokenizer.encode(" cat"), tokenizer.encode(" cat on")[len(tokenizer.encode(" cat")) :]
    assert "".join(row.add(token) for token in cat) == ""
    assert "".join(row.add(token) for token in sat) == " cat on"
