"""Recipes: what is refused, what a value means, and that file and command line agree. Cases 14, 15 and 38."""

import json
from pathlib import Path

import pytest
import yaml

from train.config import Recipe
from train.config_file import load_recipe, recipe_as_yaml, recipe_schema
from train.errors import ConfigError

LAPTOP = Path(__file__).parents[2] / "recipes" / "laptop.yaml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.weigth_decay=0.1", r"unknown setting optim\.weigth_decay; did you mean optim\.weight_decay\?"),
        ("num-epochs=3", r"unknown setting num-epochs; did you mean train\.steps\?"),
        ("learning_rate=1", r"unknown setting learning_rate; did you mean optim\.lr\?"),
        ("model.lr=1", r"unknown setting model\.lr; did you mean optim\.lr\?"),
        ("--fake=1", r"unknown setting fake; a recipe has name, runs_dir, model, data"),
        ("data.sources.0.wieght=1", r"did you mean data\.sources\.weight\?"),
        ("data.sources.7.path=x", r"needs a number below 1 where it says '7'"),
        ("train.steps.x=1", r"train\.steps\.x goes through steps, which is not a section"),
        ("train.steps", r"must read SECTION\.KEY=VALUE, such as train\.steps=200"),
        ("train.steps=1:30", r"train\.steps \('1:30'\): input should be a valid integer"),
        ("optim.lr=fast", r"optim\.lr \('fast'\): input should be a valid number"),
        ("optim.lr=0", r"optim\.lr \('0'\): input should be greater than 0"),
        ("model.n_kv_heads=none", r"model\.n_kv_heads \('none'\)"),
        ("parallel.engine=fsdp", r"input should be 'single', 'ddp', 'fsdp2'"),
        ("model.d_model=190", r"d_model \(190\) must be a multiple of n_heads \(4\); the nearest is d_model=192"),
        ("model.n_kv_heads=3", r"n_heads \(4\) must be a multiple of n_kv_heads \(3\)"),
        ("optim.warmup_steps=120", r"optim\.warmup_steps \(120\) must be below train\.steps \(120\)"),
        ("train.micro_batch_size=3", r"global_batch_size \(16\) must be a multiple of train\.micro_batch_size \(3\)"),
        ("name=a/b", r"name \('a/b'\)"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_a_way_out(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(LAPTOP, [override])
    assert "\n" not in str(caught.value)


def write_recipe(folder: Path, path: str, text: str) -> Path:
    """The laptop recipe with one value put into the file as it is written."""
    tree = yaml.safe_load(LAPTOP.read_text())
    section, key = path.split(".")
    tree[section][key] = "MARK"
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree).replace("MARK", text))
    return file


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("optim.lr", "1e-4", 1e-4),
        ("optim.lr", "6e-4", 6e-4),
        ("optim.lr", "1.0e4", 1.0e4),
        ("train.seed", "010", 10),
        ("parallel.compile", "no", False),
        ("parallel.compile", "off", False),
        ("parallel.compile", "False", False),
        ("parallel.compile", "0", False),
        ("parallel.compile", "true", True),
        ("model.n_kv_heads", "null", None),
        ("model.n_kv_heads", "~", None),
        ("checkpoint.local_dir", "010", "010"),
        ("parallel.activation_checkpointing", "none", "none"),
        ("optim.betas", "[0.8, 0.9]", (0.8, 0.9)),
    ],
)
def test_a_value_means_what_its_field_declares_in_the_file_and_on_the_command_line(
    path: str, text: str, value: object, tmp_path: Path
) -> None:
    section, key = path.split(".")
    from_file = load_recipe(write_recipe(tmp_path, path, text))
    from_command = load_recipe(LAPTOP, [f"{path}={text}"])
    for recipe in (from_file, from_command):
        assert getattr(getattr(recipe, section), key) == value


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(LAPTOP.read_text() + "\nname: twice\n")
    with pytest.raises(ConfigError, match="the key 'name' stands twice"):
        load_recipe(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "must hold sections"), (b"[1, 2]", "must hold sections"), (b"a: [", "is not YAML"), (b"\xff", "read")],
)
def test_a_file_that_is_no_recipe_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(file)


def test_a_missing_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the recipe no/such\.yaml does not exist"):
        load_recipe("no/such.yaml")


def test_the_resolved_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = load_recipe(LAPTOP, ["optim.lr=1e-4"])
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_as_yaml(recipe))
    assert load_recipe(file) == recipe


def test_the_schema_knows_every_section_and_refuses_other_keys() -> None:
    schema = json.loads(recipe_schema())
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_accumulation_is_the_global_batch_over_what_the_ranks_take_at_once(ranks: int) -> None:
    assert load_recipe(LAPTOP).grad_accum_steps(ranks) == 4 // ranks


def test_a_batch_that_does_not_divide_is_refused_with_the_two_nearest() -> None:
    recipe = load_recipe(LAPTOP, ["train.global_batch_size=500", "train.micro_batch_size=4"])
    with pytest.raises(ConfigError, match=r"\(500\).*\(4\).*\(32\) = 128; 3\.906 is not whole: use 384 or 512"):
        recipe.grad_accum_steps(32)


def test_a_recipe_is_frozen() -> None:
    recipe = load_recipe(LAPTOP)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
