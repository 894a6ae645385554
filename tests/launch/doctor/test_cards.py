"""Every network port is looked at, not the first alone."""

from pathlib import Path

from launch.doctor.cards import card_findings


def make_port(
    sys: Path, device: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", **errors: int
) -> None:
    port = sys / "infiniband" / device / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text(f"{rate}\n")
    for name in ("link_downed", "symbol_error"):
        (port / "counters" / name).write_text(f"{errors.get(name, 0)}\n")


def told(sys: Path) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in card_findings(sys)]


def test_ports_that_are_all_well_give_one_line(tmp_path: Path) -> None:
    for number in range(8):
        make_port(tmp_path, f"mlx5_{number}")
    assert told(tmp_path) == [("ok", "8 RDMA ports active, the fastest at 400 Gbit/s")]


def test_a_port_that_is_down_slow_or_faulty_is_named(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0")
    make_port(tmp_path, "mlx5_1", state="1: DOWN")
    make_port(tmp_path, "mlx5_2", rate="200 Gb/sec (4X HDR)")
    make_port(tmp_path, "mlx5_3", link_downed=4)
    assert told(tmp_path) == [
        ("note", "RDMA ports that are not active: mlx5_1/1 (1: DOWN)"),
        ("note", "RDMA ports are slower than 400 Gbit/s: mlx5_2/1 at 200"),
        ("note", "RDMA port mlx5_3/1 has counted errors since its start: link_downed 4"),
    ]


def test_a_machine_without_an_active_port_has_a_problem(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", state="1: DOWN")
    assert told(tmp_path) == [("problem", "no RDMA port is active: mlx5_0/1 (1: DOWN)")]


def test_ethernet_is_listed_without_virtual_interfaces(tmp_path: Path) -> None:
    for name, speed, real in (("eth0", "100000", True), ("veth1", "10000", False), ("eth1", "-1", True)):
        folder = tmp_path / "net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(speed)
        (folder / "operstate").write_text("up")
        if real:
            (folder / "device").mkdir()
    assert told(tmp_path) == [("ok", "Ethernet: eth0 100 Gbit/s")]
    assert told(tmp_path / "absent") == []
