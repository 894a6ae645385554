"""The command `keepstep doctor` on this machine."""

import json

from launch import cli
from launch.plan.machine import find_machine


def test_this_machine_can_train(tmp_path, capsys):
    code = cli.main(["doctor", "--json", "--dir", str(tmp_path)])
    *findings, figures = map(json.loads, capsys.readouterr().out.splitlines())
    assert (code == 0) is not any(finding["level"] == "problem" for finding in findings)
    assert any("rename and fsync work" in finding["what"] for finding in findings)
    assert figures["figures"] == {}
    assert list(tmp_path.iterdir()) == []


def test_every_line_of_the_table_begins_with_the_host(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "rack-7")
    cli.main(["doctor", "--dir", str(tmp_path / "absent")])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["host", "level", "finding"]
    assert all(line.startswith("rack-7") for line in lines)
    assert any(line.split()[1:4] == ["problem", "cannot", "write"] for line in lines)
    assert any("do:  choose another runs_dir" in line for line in lines)


def test_figures_are_measured_and_printed_for_programs(tmp_path, capsys):
    cli.main(["doctor", "--json", "--measure", "--dir", str(tmp_path)])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert set(figures) == {
        "devices",
        "matmul_bf16_flops_per_second",
        "slowest_of_fastest_device",
        "copy_bytes_per_second",
        "memory_bytes",
        "disk_write_bytes_per_second",
    }
    assert all(value > 0 for name, value in figures.items() if name != "devices")


def test_the_output_with_figures_is_a_file_of_machines(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "rack-7")
    cli.main(["doctor", "--measure", "--dir", str(tmp_path)])
    file = tmp_path / "my.yaml"
    file.write_text(capsys.readouterr().out)
    assert "# rack-7" in file.read_text()
    machine = find_machine("rack-7", file)
    assert machine.generation == "measured"
    assert machine.best("bf16") > 0
    assert cli.main(["plan", "recipes/laptop.yaml", "--gpus", "1", "--gpu", "rack-7", "--machines", str(file)]) == 0
    assert "matrix products" in capsys.readouterr().out
