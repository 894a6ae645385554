"""Recipes: which are refused, how values are read, and that file and command line agree."""

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
        ("num-epochs=3", r"unknown setting num-epochs; did you mean train\.epochs\?"),
        ("learning_rate=1", r"unknown setting learning_rate; did you mean optim\.lr\?"),
        ("model.lr=1", r"unknown setting model\.lr; did you mean optim\.lr\?"),
        ("--fake=1", r"unknown setting fake; a recipe has name, runs_dir, model, data"),
        ("data.sources.0.wieght=1", r"did you mean data\.sources\.weight\?"),
        ("data.sources.7.path=x", r"needs a number below 1 in place of '7'"),
        ("train.steps.x=1", r"train\.steps\.x names a setting inside steps, which is not a section"),
        ("train.steps", r"must have the form SECTION\.KEY=VALUE, such as train\.steps=200"),
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
        ("optim.betas=[1.0, 0.95]", r"optim\.betas\.0 \('1\.0'\): input should be less than 1"),
        ("optim.betas=[0.9, -1]", r"optim\.betas\.1 \('-1'\): input should be greater than or equal to 0"),
        ("data.weight_changes=[{step: 5, weights: [inf]}]", r"weights\.0 \('inf'\): input should be a finite number"),
        ("parallel.timeout_seconds=1e18", r"parallel\.timeout_seconds \('1e18'\): input should be less than"),
        ("model.d_model=194", r"must be a multiple of n_heads \(4\); the nearest is d_model=192"),
        ("model.d_model=196", r"head width, but d_model \(196\) / n_heads \(4\) is 49; the nearest is d_model=192"),
        ("parallel.tensor=3", r"seq_len \(256\) must be a multiple of parallel\.tensor \(3\).*parallel\.tensor to 2"),
        ("model.vocab_size=99999999999999999999", r"model\.vocab_size \('9+'\): input should be less than or equal to"),
        ("model.n_layers=100000000", r"model\.n_layers \('100000000'\): input should be less than or equal to 10000"),
        ("data.sources.².path=x", r"needs a number below 1 in place of '²'"),
        ("runs_dir=$NOT_SET/runs", r"runs_dir: the variable \$NOT_SET in '\$NOT_SET/runs' is not set"),
        ("data.sources.0.path=~nobody-here/x", r"data\.sources\.0\.path: '~nobody-here/x' names no home folder"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_a_way_out(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(LAPTOP, [override])
    assert "\n" not in str(caught.value)


def write_recipe(folder: Path, path: str, text: str) -> Path:
    """The laptop recipe with the text of one value replaced."""
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
def test_the_type_of_the_field_decides_how_a_value_is_read_in_the_file_and_on_the_command_line(
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
    with pytest.raises(ConfigError, match="the key 'name' is given twice"):
        load_recipe(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "must contain sections"), (b"[1, 2]", "must contain sections"), (b"a: [", "is not YAML"), (b"\xff", "read")],
)
def test_a_file_that_is_not_a_recipe_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(file)


def test_a_missing_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the recipe no/such\.yaml does not exist"):
        load_recipe("no/such.yaml")


def test_the_resolved_recipe_is_equal_when_read_again(tmp_path: Path) -> None:
    recipe = load_recipe(LAPTOP, ["optim.lr=1e-4"])
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_as_yaml(recipe))
    assert load_recipe(file) == recipe


def test_the_schema_has_every_section_and_refuses_other_keys() -> None:
    schema = json.loads(recipe_schema())
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradient_accumulation_is_the_global_batch_over_one_micro_batch_of_all_ranks(ranks: int) -> None:
    assert load_recipe(LAPTOP).grad_accum_steps(ranks) == 4 // ranks


def test_a_global_batch_that_does_not_divide_is_refused_with_the_two_nearest() -> None:
    recipe = load_recipe(LAPTOP, ["train.global_batch_size=500", "train.micro_batch_size=4"])
    with pytest.raises(ConfigError, match=r"\(500\).*\(4\).*\(32\) = 128; 3\.906 is not whole: use 384 or 512"):
        recipe.grad_accum_steps(32)


def test_a_recipe_is_frozen() -> None:
    recipe = load_recipe(LAPTOP)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def float_settings() -> list[str]:
    """Dotted names of all settings of the laptop recipe that are floats, optional ones included."""
    tree = load_recipe(LAPTOP).model_dump()
    names = [f"{section}.{key}" for section, part in tree.items() if isinstance(part, dict) for key in part]
    fields = {name: Recipe.model_fields[name.split(".")[0]].annotation for name in names}
    kinds = {name: str(section.model_fields[name.split(".")[1]].annotation) for name, section in fields.items()}  # pyright: ignore
    lengths = ("train.tokens", "train.epochs")  # tests/train/test_run_length.py
    floats = [name for name, kind in kinds.items() if "float" in kind and "tuple" not in kind and name not in lengths]
    return [*floats, "data.sources.0.weight"]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("name", float_settings())
def test_no_number_may_be_infinite_or_nan(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} \('{value}'\): input should be"):
        load_recipe(LAPTOP, [f"{name}={value}"])


def test_two_settings_that_do_not_fit_each_other_are_refused() -> None:
    overlap = ["optim.schedule=wsd", "optim.warmup_steps=100"]
    with pytest.raises(ConfigError, match=r"warmup_steps \(100\) \+ optim\.decay_steps \(24\) must be at most .*to 20"):
        load_recipe(LAPTOP, overlap)
    assert load_recipe(LAPTOP, [*overlap, "optim.decay_steps=20"]).optim.decay_of_wsd(120) == 20
    with pytest.raises(ConfigError, match=r"keep_best \(2\) needs validation losses, but train\.eval_sequences \(0\)"):
        load_recipe(LAPTOP, ["checkpoint.keep_best=2", "train.eval_sequences=0"])


def test_a_run_that_keeps_the_best_checkpoints_evaluates_before_each_save() -> None:
    settings = ["checkpoint.every=20", "train.eval_every=50", "train.steps=110"]
    plain, best = load_recipe(LAPTOP, settings), load_recipe(LAPTOP, [*settings, "checkpoint.keep_best=1"])
    assert [step for step in range(1, 111) if plain.evaluates_after(step)] == [50, 100, 110]
    assert [step for step in range(1, 111) if best.evaluates_after(step)] == [20, 40, 50, 60, 80, 100, 110]


@pytest.mark.parametrize(
    ("text", "value"),
    [("data/a #1", "data/a #1"), ("a: b", "a: b"), ("- x", "- x"), ("&a", "&a"), ("[x]y", "[x]y"), (" '#' ", "#")],
)
def test_an_override_is_taken_literally(text: str, value: str) -> None:
    assert load_recipe(LAPTOP, [f"data.sources.0.path={text}"]).data.sources[0].path == value


def test_home_and_variables_in_paths_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    paths = ["runs_dir=~/runs", "data.sources.0.path=${SCRATCH}/data", "data.sources.0.mirror=s3://a/$SCRATCH"]
    recipe = load_recipe(LAPTOP, [*paths, "checkpoint.local_dir=$NODE_DISK/x"])
    source = recipe.data.sources[0]
    assert (recipe.runs_dir, source.path, source.mirror) == ("/home/me/runs", "/scratch/me/data", "s3://a//scratch/me")
    assert recipe.checkpoint.local_dir == "$NODE_DISK/x", "each node expands it for itself"


YAML_FEATURES = """\
---
x-common: &common {global_batch_size: 8, micro_batch_size: 4, steps: 50}
name: >-
  features
model: {vocab_size: 512, seq_len: 32, n_layers: 1, n_heads: 2, d_model: &width 16, d_ff: *width}
data:
  sources:
    - &first {path: "data/a"}
    - *first
optim: {lr: !!float 1e-3, warmup_steps: 5}
train:
  <<: *common
  steps: 1_000
"""


def test_yaml_anchors_merge_keys_and_long_strings_work(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(YAML_FEATURES)
    recipe = load_recipe(file, ["data.sources.1.path=data/b"])
    assert (recipe.name, recipe.model.d_ff, recipe.optim.lr) == ("features", 16, 1e-3)
    assert (recipe.train.steps, recipe.train.global_batch_size) == (1000, 8)
    assert [source.path for source in recipe.data.sources] == ["data/a", "data/b"], "an override changes one source"


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12))


@pytest.mark.parametrize("content", [BOMB, MERGES, "a: &a [*a]\n", "a: " + "[" * 5000 + "]" * 5000])
def test_aliases_that_explode_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match="once its YAML aliases are expanded"):
        load_recipe(file)
