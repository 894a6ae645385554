"""A decoder gives each row the tokens that it would get alone, whatever its length."""

from collections.abc import Sequence

import pytest
import torch

from train.generation import decoder
from train.generation.decoder import Decoder
from train.generation.sampling import Sampling
from train.model.config import ModelConfig
from train.model.gpt import GPT

GREEDY = Sampling(temperature=0.0)
VOCAB, END, NONE = 40, 0, -1
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(5)
    sizes = {"vocab_size": 48, "seq_len": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32}
    return GPT(ModelConfig.model_validate(sizes | {"init_std": 0.5, "tied_embeddings": False})).eval()


def tokens_of(
    model: GPT, prompts: Sequence[list[int]], max_tokens: int, sampling: Sampling, end: int = NONE
) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in prompts]
    made = Decoder(
        model,
        prompts,
        vocab_size=VOCAB,
        end_of_document=end,
        max_tokens=max_tokens,
        sampling=sampling,
        seeds=[7] * len(prompts),
    )
    while chosen := made.step():
        for row, token in chosen.items():
            rows[row] += [] if token is None else [token]
    return rows


@torch.inference_mode()
def greedy_without_cache(model: GPT, prompt: list[int], max_tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(max_tokens):
        tokens_1T = torch.tensor([text])
        found = model(tokens_1T, torch.arange(len(text))[None], torch.zeros_like(tokens_1T))
        assert isinstance(found, torch.Tensor)
        text.append(int(found[0, -1, :VOCAB].argmax()))
    return text[len(prompt) :]


def test_greedy_rows_of_different_lengths_equal_a_model_without_cache(model: GPT) -> None:
    expected = [greedy_without_cache(model, prompt, 12) for prompt in PROMPTS]
    assert tokens_of(model, PROMPTS, 12, GREEDY) == expected
    assert len({tuple(row) for row in expected}) == 3
    assert all(len(set(row)) > 2 for row in expected), "the model must not repeat one token"


def test_a_prompt_that_passes_in_chunks_gives_the_same(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokens_of(model, PROMPTS, 8, GREEDY)
    monkeypatch.setattr(decoder, "CHUNK", 2)
    assert tokens_of(model, PROMPTS, 8, GREEDY) == whole


def test_a_seed_gives_a_row_the_same_tokens_alone_and_beside_others(model: GPT) -> None:
    sampling = Sampling(temperature=1.0, top_k=None)
    together = tokens_of(model, PROMPTS, 10, sampling)
    assert together == tokens_of(model, PROMPTS, 10, sampling)
    assert together == [tokens_of(model, [prompt], 10, sampling)[0] for prompt in PROMPTS]


def test_a_row_ends_with_its_document_and_the_others_go_on(model: GPT) -> None:
    free = tokens_of(model, PROMPTS, 12, GREEDY)
    end = free[0][3]
    ended = tokens_of(model, PROMPTS, 12, GREEDY, end)
    assert ended == [row[: row.index(end)] if end in row else row for row in free]
    assert ended[0] != free[0]
    assert ended[1:] != [[], []]


def test_a_text_longer_than_the_context_goes_on_from_its_newest_half(model: GPT) -> None:
    """seq_len is 24: a row of 3 tokens is full after 21 more, and token 23 follows the newest 12."""
    found = tokens_of(model, PROMPTS, 40, GREEDY)
    text = PROMPTS[0] + found[0]
    assert len(found[0]) == len(found[2]) == 40
    assert found[0][:22] == greedy_without_cache(model, PROMPTS[0], 22)
    assert text[25:37] == greedy_without_cache(model, text[13:25], 12)


def test_a_prompt_longer_than_the_context_is_cut_to_its_newest_half(model: GPT) -> None:
    prompt = [n % 37 + 1 for n in range(60)]
    assert tokens_of(model, [prompt], 5, GREEDY) == [greedy_without_cache(model, prompt[-12:], 5)]


def test_ids_beyond_the_tokenizer_are_never_chosen(model: GPT) -> None:
    flat = Sampling(temperature=1000.0, top_k=None)
    assert max(map(max, tokens_of(model, PROMPTS, 100, flat))) == VOCAB - 1
