"""The process groups of a layout, as torch's DeviceMesh with an axis for each of the layout's."""

from datetime import timedelta

from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.layout import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh with all axes of the layout, some of which may have size 1. Collective."""
    return init_device_mesh(device_type, tuple(layout.axes.values()), mesh_dim_names=tuple(layout.axes))


def data_parallel_group(mesh: DeviceMesh) -> ProcessGroup:
    """The ranks along replicate x shard: they see different data and have one position on `tensor`. Collective."""
    return mesh["replicate", "shard"]._flatten("data").get_group()


def limit_collectives(seconds: float) -> None:
    """Let no collective of any group of this rank take longer than this. torch gives new groups 10 or 30 minutes."""
    for group in list(distributed_c10d._world.pg_map):
        if distributed_c10d.get_backend(group) != "fake":  # its collectives complete immediately
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
