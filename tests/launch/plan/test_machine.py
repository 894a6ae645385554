"""The table of machines, and a user's own."""

import pytest

from launch.plan.machine import find_machine, read_machines
from train.errors import ConfigError


def test_the_table_has_the_published_figures_of_the_h100():
    machine = find_machine("H100")
    assert machine.peak("bf16") == 989e12
    assert machine.best("fp8") == 1402.6e12
    assert machine.memory_bytes == 80e9


def test_every_machine_multiplies_in_bf16_no_faster_than_its_peak():
    for name, machine in read_machines().items():
        assert machine.best("bf16") <= machine.peak("bf16"), name


def test_an_unknown_machine_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"--gpu h1000 is not known: the nearest is h100"):
        find_machine("h1000")


def test_a_machine_of_the_users_is_read_beside_the_known_ones(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "mine: {memory_gb: 10, memory_tb_s: 1, peak_tflops: {bf16: 10}, link_gb_s: 1, domain: 2, network_gb_s: 1}\n"
    )
    assert find_machine("mine", path).best("bf16") == 8e12
    assert find_machine("h100", path).memory_gb == 80


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine: {memory_gb: -1}", "mine: memory_gb: Input should be greater than 0"),
        ("mine: 3", "mine: Input should be a valid dictionary"),
        ("- a", "Input should be a valid dictionary"),
        ("a: {b", "is not YAML"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, text, message):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_machine("mine", path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        find_machine("mine", tmp_path / "absent.yaml")
