"""The promises of every engine, checked on two real ranks that are started once."""

import math
from typing import Any

import pytest
import torch

from parallel.build_engine import build_engine
from tests.parallel.engine_checks import measure_one, reload_one, skip_in_one
from tests.parallel.engine_trial import config_of, runtime_of, trainable
from tests.parallel.ranks import run_ranks

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "tensor": {"engine": "fsdp2", "tensor": 2},
    "zero1": {"engine": "zero1"},
    "zero2": {"engine": "zero2"},
    "zero3": {"engine": "zero3"},
}
NARROW = {f"{name}, bf16": {**settings, "precision": "bf16"} for name, settings in ENGINES.items()}
MEASURED = {
    **{name: settings for name, settings in ENGINES.items() if name != "tensor"},
    **{name: settings for name, settings in NARROW.items() if name != "tensor, bf16"},
    "fsdp2, gathered once": {"engine": "fsdp2", "reshard_after_forward": False},
    "fsdp2, reduced once": {"engine": "fsdp2", "reduce_every_micro_batch": False},
    "zero3, gathered once": {"engine": "zero3", "reshard_after_forward": False},
    "zero3, 6 blocks": {"engine": "zero3", "model": {"n_layers": 6, "tied_embeddings": False}},
    "fsdp2, untied": {"engine": "fsdp2", "model": {"tied_embeddings": False}},
}
SKIPPED = {**ENGINES, **NARROW, "fsdp2, fp16": {"engine": "fsdp2", "precision": "fp16"}}
RELOADED = {**ENGINES, "zero1, bf16": NARROW["zero1, bf16"], "zero3, bf16": NARROW["zero3, bf16"]}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    cases = {"measure": MEASURED, "skip": SKIPPED, "reload": RELOADED}
    return run_ranks("tests/parallel/engine_checks.py", "all_on_two", 2, cases)


@pytest.mark.parametrize("name", MEASURED)
def test_bytes_sent_in_a_step_equal_the_formula(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        counted, formula = rank["measure"][name]["traffic"], rank["measure"][name]["traffic by formula"]
        large = {kind: size for kind, size in counted.items() if size > 64}  # leaves out the four bytes of the norm
        assert large == pytest.approx(formula, rel=1e-3)


@pytest.mark.parametrize("name", MEASURED)
def test_bytes_kept_after_the_backward_pass_equal_the_formula_to_2_percent(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        assert rank["measure"][name]["state"] == pytest.approx(rank["measure"][name]["state by formula"], rel=0.02)


@pytest.mark.parametrize("name", SKIPPED)
def test_a_step_with_a_non_finite_or_too_large_gradient_changes_nothing(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (rank["skip"][name] for rank in ranks)
    assert not math.isfinite(first["norm of a bad step"])
    assert not math.isfinite(second["norm of a bad step"])
    assert first["norm of a large step"] == second["norm of a large step"] > 1e-3
    for kind in ("bad", "large"):
        assert not first[f"{kind} step moved"]
        assert not second[f"{kind} step moved"]


@pytest.mark.parametrize("name", SKIPPED)
def test_the_step_after_a_skipped_one_is_unaffected_by_it(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        result = rank["skip"][name]
        assert result["good step moved"]
        if "fp16" not in name:  # fp16 has changed its loss scale
            assert result["norm of a good step"] == result["norm of a large step"]


@pytest.mark.parametrize("name", RELOADED)
def test_an_engine_filled_in_place_continues_with_the_same_bits(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(rank["reload"][name] for rank in ranks)


def test_collectives_agree_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["small"]["sum"] == 3.0
        assert rank["small"]["any"] == (True, False)
        assert rank["small"]["gather"] == [0, 1]


def test_tensor_parallel_peers_draw_the_same_numbers_and_data_parallel_ranks_do_not(
    ranks: list[dict[str, Any]],
) -> None:
    first, second = ranks[0]["small"]["peers draw"]
    assert first == second
    first, second = ranks[0]["small"]["data-parallel ranks draw"]
    assert first != second


def test_a_split_model_has_the_dropout_masks_of_the_whole_model(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        split, whole = rank["small"]["dropout"]
        torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-4)


def test_the_split_loss_and_its_gradient_equal_the_whole_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        loss_B, exact_B, gradient, exact_gradient = rank["small"]["loss"]
        torch.testing.assert_close(loss_B, exact_B)
        torch.testing.assert_close(gradient, exact_gradient)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_single_engine_keeps_the_same_promises(precision: str) -> None:
    result = skip_in_one({"engine": "single", "precision": precision})
    assert not math.isfinite(result["norm of a bad step"])
    assert not result["bad step moved"]
    assert not result["large step moved"]
    assert result["good step moved"]
    assert reload_one({"engine": "single", "precision": precision})


def test_a_single_process_sends_nothing_and_keeps_the_bytes_of_the_formula() -> None:
    result = measure_one({"engine": "single"})
    assert result["traffic"] == {}
    assert result["state"] == pytest.approx(result["state by formula"], rel=0.02)


def test_the_state_has_one_name_for_each_weight_and_each_tensor_of_the_optimizer() -> None:
    engine = build_engine(config_of(engine="single"), runtime_of(config_of(engine="single")), trainable())
    names = {name for name, _ in trainable().build().named_parameters()}
    assert engine.state().keys() == {f"model.{name}" for name in names} | {
        f"optim.{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq", "step")
    }
    assert all(tensor.dtype == torch.float32 for tensor in engine.state().values())


def test_fp16_adds_its_loss_scale_to_the_state() -> None:
    config = config_of(engine="single", precision="fp16")
    engine = build_engine(config, runtime_of(config), trainable())
    assert {"scaler.scale", "scaler.good_steps"} <= engine.state().keys()
