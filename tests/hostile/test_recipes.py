"""A recipe is text that anyone may have written: it is read within limits and never becomes a command."""

import os
import resource
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from launch import cli
from launch.clusters.options import directive
from launch.clusters.slurm import JobOptions, job_script
from parallel.errors import LaunchError
from train.config_file import load_recipe, resolved_recipe
from train.errors import ConfigError
from train.recipe.yaml_text import MAX_BYTES, MAX_VALUES
from train.run_folder import RunFolder

LAPTOP = Path(__file__).parents[2] / "recipes" / "laptop.yaml"
CONTROL = ["\n", "\r", "\t", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\ud800"]
SHELL = [
    "a b",
    "a'b",
    'a"b',
    "a#b",
    "a # b",
    "$(touch evil)",
    "`touch evil`",
    "a;touch evil",
    "a&&b",
    "%u-%j",
    "a=b",
    "~x",
]


@pytest.mark.parametrize("character", CONTROL)
@pytest.mark.parametrize(
    "setting", ["runs_dir", "name", "data.sources.0.path", "checkpoint.local_dir", "optim.algorithm", "nothing"]
)
def test_a_control_character_is_refused_in_every_text(setting: str, character: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting}: .*one line without control characters") as caught:
        load_recipe(LAPTOP, [f"{setting}=a{character}touch evil"])
    assert "\n" not in str(caught.value)


def test_a_variable_cannot_bring_a_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/x\ntouch evil")
    with pytest.raises(ConfigError, match=r"runs_dir: .*one line without control characters"):
        load_recipe(LAPTOP, ["runs_dir=$SCRATCH"])


def test_a_key_with_a_line_break_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(LAPTOP.read_text() + '"a\\nb": 1\n')
    with pytest.raises(ConfigError, match=r"the name of a setting: .*one line without control characters"):
        load_recipe(file)


@pytest.mark.parametrize("address", ["s3://bucket/runs", "file:///tmp/runs", "memory://x"])
def test_a_run_is_not_written_to_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"runs_dir \(.*\) must be a folder of a file system, not an address"):
        load_recipe(LAPTOP, [f"runs_dir={address}"])
    with pytest.raises(ConfigError, match=r"checkpoint.local_dir \(.*\) must be a folder"):
        load_recipe(LAPTOP, [f"checkpoint.local_dir={address}"])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_reads_like_an_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runs_dir \(--wrap=evil\) reads like an option"):
        load_recipe(LAPTOP, ["runs_dir=--wrap=evil"])


BIG = {
    "many keys": "".join(f"key{number}: 1\n" for number in range(50_000)),
    "many values": "a: [" + "x, " * 300_000 + "x]",
    "many complex keys": "? a\n" * 200_000,
    "deep": "a: " + "[" * 500_000,
    "deep mappings": "{a: " * 200_000,
    "aliases": "a: &a [x]\nb: [" + "*a, " * 200_000 + "*a]",
    "one long text": "a: " + "x" * (MAX_BYTES - 10),
    "a long comment": "#" * (MAX_BYTES - 1),
    "100 MB": "a: 1\n" * 20_000_000,
}


@pytest.mark.parametrize("content", BIG.values(), ids=BIG.keys())
def test_a_huge_recipe_is_refused_in_one_line_and_within_limits(tmp_path: Path, content: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(ConfigError) as caught:
        load_recipe(file)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert len(str(caught.value)) < 20_000
    assert "\n" not in str(caught.value)
    assert after.ru_maxrss - before.ru_maxrss < 500 * 1024, "KiB"
    assert after.ru_utime - before.ru_utime < 60, "seconds of this process, not of the clock"


def test_thousands_of_unknown_settings_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(LAPTOP.read_text() + "".join(f"key{number}: 1\n" for number in range(MAX_VALUES // 3)))
    with pytest.raises(ConfigError, match=r"unknown setting key0.* and 6646 more") as caught:
        load_recipe(file)
    assert len(str(caught.value)) < 20_000


def test_an_override_with_thousands_of_dots_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no name of a setting, which has 8 dots at most"):
        load_recipe(LAPTOP, ["a." * 20_000 + "b=1"])


def test_a_recipe_that_was_cut_off_is_refused_at_every_length(tmp_path: Path) -> None:
    recipe = load_recipe(LAPTOP)
    whole = resolved_recipe(recipe)
    file = tmp_path / "recipe.yaml"
    file.write_bytes(whole)
    assert load_recipe(file) == recipe
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"is cut off|must contain sections"):
            load_recipe(file)


@pytest.mark.parametrize("text", SHELL)
def test_the_job_script_keeps_each_text_in_its_place(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path / text / "run")
    job = JobOptions(recipe=tmp_path / f"{text}.yaml", overrides=[f"runs_dir={text}"], sbatch=["--comment", text])
    script = job_script(job, folder)
    settings = script.partition("# --- settings")[2].partition("# --- end of settings")[0]
    shown = subprocess.run(
        ["bash", "-c", f'{settings}\nprintf "%s\\0" "$RUN" "$RECIPE" "${{OVERRIDES[@]}}"'],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.split("\0")[:-1] == [str(folder.root), str(job.recipe), f"runs_dir={text}"]
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    options = [shlex.split(line, comments=True) for line in lines]
    assert all(len(words) == 1 for words in options), "one option in a line"
    assert [f"--comment={text}"] in options
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="there is no sbatch on this machine")
@pytest.mark.parametrize("text", SHELL)
def test_sbatch_itself_reads_each_option_as_it_was_meant(tmp_path: Path, text: str) -> None:
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nSlurmctldPort=9\nNodeName=localhost\n"
    )
    (tmp_path / "job").write_text(f"#!/bin/bash\n{directive('comment', text)}\n{directive('output', '/' + text)}\n")
    env = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf"), "SLURM_MSG_TIMEOUT": "1"}
    shown = subprocess.run(["sbatch", "-vv", str(tmp_path / "job")], env=env, capture_output=True, text=True)
    options = dict(line.removeprefix("sbatch: ").split(": ", 1) for line in shown.stderr.splitlines() if " : " in line)
    given = {name.strip(): value for name, value in options.items() if name.strip() != "verbose"}
    assert given == {"comment": text, "output": f"/{text}"}


@pytest.mark.parametrize("character", [character for character in CONTROL if character not in "\0\ud800"])
def test_the_renderer_refuses_what_it_cannot_quote(tmp_path: Path, character: str) -> None:
    folder = RunFolder(tmp_path / "run")
    evil = f"x{character}#SBATCH --wrap=evil"
    for job in (
        JobOptions(recipe=Path("r.yaml"), sbatch=["--comment", evil]),
        JobOptions(recipe=Path("r.yaml"), overrides=[f"runs_dir={evil}"]),
        JobOptions(recipe=tmp_path / evil),
        JobOptions(recipe=Path("r.yaml"), sweep=[evil]),
    ):
        with pytest.raises(LaunchError, match="one line without control characters"):
            job_script(job, folder)
    with pytest.raises(LaunchError, match="one line without control characters"):
        job_script(JobOptions(recipe=Path("r.yaml")), RunFolder(tmp_path / evil))


@pytest.mark.parametrize("name", ["comment --wrap", "comment\n#SBATCH --wrap", "", "Comment", "x=y"])
def test_a_name_that_is_no_option_is_refused(name: str) -> None:
    with pytest.raises(LaunchError, match="is no name of an sbatch option"):
        directive(name, "x")


def test_a_backslash_in_the_path_of_the_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="has a backslash in its path"):
        job_script(JobOptions(recipe=Path("r.yaml")), RunFolder(tmp_path / "a\\b" / "run"))


@pytest.mark.parametrize("text", SHELL)
def test_the_kubernetes_manifest_keeps_each_text_in_its_place(capsys: pytest.CaptureFixture[str], text: str) -> None:
    override = f"runs_dir=/shared/{text}"
    command = [
        "kubernetes",
        str(LAPTOP),
        override,
        "data.sources.0.path=/shared/d",
        "--gpus",
        "0",
        "--env",
        f"X={text}",
    ]
    assert cli.main([*command, "--image", text, "--claim", "c"]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    [start] = [document["data"]["start.sh"] for document in documents if document["kind"] == "ConfigMap"]
    [line] = [line for line in start.splitlines() if line.startswith("keepstep run")]
    assert override in shlex.split(line)
    [job] = [document for document in documents if document["kind"] == "PyTorchJob"]
    [container] = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert container["image"] == text
    assert {"name": "X", "value": text} in container["env"]


@pytest.mark.parametrize("option", ["--image", "--env", "--rdma", "--request", "--toleration"])
def test_the_kubernetes_manifest_refuses_control_characters(capsys: pytest.CaptureFixture[str], option: str) -> None:
    command = ["kubernetes", str(LAPTOP), "runs_dir=/shared/r", "data.sources.0.path=/shared/d", "--gpus", "0"]
    assert cli.main([*command, "--image", "i", "--claim", "c", option, "a=b\nc"]) == 2
    assert "one line without control characters" in capsys.readouterr().err


def test_a_runs_folder_that_links_to_itself_is_refused(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "runs")
    with pytest.raises(ConfigError, match="is a link that leads to itself; remove it"):
        RunFolder.of(load_recipe(LAPTOP, [f"runs_dir={tmp_path / 'runs'}"]))
