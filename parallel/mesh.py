"""The process groups of a layout, as torch's DeviceMesh with an axis for each of the layout's."""

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.layout import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh with all axes of the layout, some of which may have size 1. Collective."""
    return init_device_mesh(device_type, tuple(layout.axes.values()), mesh_dim_names=tuple(layout.axes))


def data_parallel_group(mesh: DeviceMesh) -> ProcessGroup:
    """The ranks along replicate x shard: they see different data and have one position on `tensor`. Collective."""
    return mesh["replicate", "shard"]._flatten("data").get_group()
