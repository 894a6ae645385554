"""The process groups of a layout, as torch's DeviceMesh with the axes `replicate`, `shard` and `tensor`."""

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.layout import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """All three axes always exist, some of size 1. Collective."""
    return init_device_mesh(
        device_type,
        (layout.replicate, layout.shard, layout.tensor),
        mesh_dim_names=("replicate", "shard", "tensor"),
    )


def data_parallel_group(mesh: DeviceMesh) -> ProcessGroup:
    """The ranks that see different data and are alike otherwise: replicate x shard. Collective."""
    return mesh["replicate", "shard"]._flatten("data").get_group()
