"""Old names of settings: read with a warning, and refused beside the new name."""

import logging
from pathlib import Path

import pytest
import yaml

from train.checkpoint.format.manifest import decode, flat
from train.config import Recipe
from train.config_file import load_recipe
from train.errors import ConfigError
from train.old_names import OLD_NAMES, replace_old_names
from train.recipe.mistakes import setting_names
from train.start import identity_of

LAPTOP = Path(__file__).parents[2] / "recipes" / "laptop.yaml"


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.delenv("KEEPSTEP_RUN", raising=False)
    caplog.set_level(logging.WARNING)
    return caplog


def file_with_old_names(folder: Path, **guard: int) -> Path:
    file = folder / "recipe.yaml"
    tree = yaml.safe_load(LAPTOP.read_text())
    tree["model"]["rope_base"] = 500_000
    tree["guard"] = guard
    file.write_text(yaml.safe_dump(tree))
    return file


def test_old_names_in_a_file_are_read_with_one_warning_each(
    tmp_path: Path, warnings_of: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(file_with_old_names(tmp_path, max_in_a_row=3, max_in_all=4))
    assert recipe.model.rope_theta == 500_000
    assert (recipe.guard.max_consecutive_bad_steps, recipe.guard.max_bad_steps) == (3, 4)
    assert [record.message for record in warnings_of.records] == [
        f"the setting {old} is now called {OLD_NAMES[old]}; the old name still works" for old in sorted(OLD_NAMES)
    ]


@pytest.mark.parametrize("override", ["model.rope_base=7", "--model.rope_base=7"])
def test_an_override_may_use_an_old_name_and_replaces_the_file(
    override: str, tmp_path: Path, warnings_of: pytest.LogCaptureFixture
) -> None:
    for file in (LAPTOP, file_with_old_names(tmp_path)):
        warnings_of.clear()
        assert load_recipe(file, [override]).model.rope_theta == 7
        assert len(warnings_of.records) == 1


def test_a_section_that_an_override_replaces_may_use_old_names() -> None:
    assert load_recipe(LAPTOP, ["guard={max_in_all: 5}"]).guard.max_bad_steps == 5


def test_a_setting_under_its_old_and_its_new_name_is_refused(tmp_path: Path) -> None:
    message = r"guard\.max_in_all is the old name of guard\.max_bad_steps, and both are given; remove guard\.max_in_all"
    with pytest.raises(ConfigError, match=message):
        load_recipe(file_with_old_names(tmp_path, max_in_all=1, max_bad_steps=2))
    with pytest.raises(ConfigError, match=message):
        load_recipe(LAPTOP, ["guard.max_bad_steps=2", "guard.max_in_all=1"])


def test_ranks_that_keepstep_run_started_do_not_repeat_the_warning(
    warnings_of: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_RUN", "runs/laptop")
    load_recipe(LAPTOP, ["model.rope_base=7"])
    assert not warnings_of.records


def test_every_old_name_stands_for_a_setting_and_is_none_itself() -> None:
    names = set(setting_names(Recipe))
    assert names >= set(OLD_NAMES.values())
    assert not names & set(OLD_NAMES)


def test_sections_without_old_names_stay_unchanged() -> None:
    for tree in ({}, {"model": None}, {"model": "text", "guard": {"max_bad_steps": "5"}}):
        before = str(tree)
        assert replace_old_names(tree) == set()
        assert str(tree) == before


def test_a_checkpoint_of_an_earlier_version_has_the_identity_of_its_recipe_today() -> None:
    run = Path(__file__).parents[1] / "earlier_version" / "run"
    manifest = decode((run / "checkpoints" / "step-00000004" / "manifest.json").read_bytes())
    today, then = flat(identity_of(load_recipe(run / "recipe.yaml"))), flat(manifest.identity)
    assert then == {name: today[name] for name in then}, "settings that are new since have defaults"
