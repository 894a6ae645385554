"""Fills the state from one checkpoint. Each rank reads only the parts that DCP's load planner assigns to it."""

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from train.checkpoint.format.manifest import Manifest
from train.checkpoint.group import Group
from train.checkpoint.saved_state import Loaded, LoadRequest, SavedProgress
from train.checkpoint.shard_reader import ShardReader
from train.checkpoint.stores.protocol import Folder
from train.errors import CheckpointError


def fill(folder: Folder, group: Group, manifest: Manifest, request: LoadRequest) -> Loaded:
    """Read this rank's parts into the tensors of the request. Collective.

    Each rank plans its reads alone; the ranks only share their errors. DamagedError leaves the tensors half filled, so
    the caller fills them from another checkpoint or ends the run. CheckpointError if this checkpoint lacks tensors that
    a failed fill has changed."""
    reader = ShardReader(folder, manifest, group.alive)

    def read() -> None:
        if mixed := request.touched - manifest.state_names:
            raise CheckpointError(
                f"a load that failed has changed {min(mixed)}, which the checkpoint of step {manifest.step} does not "
                "have; run the same command again: the damaged checkpoint is in quarantine now"
            )
        request.touched.update(request.state.keys() & manifest.state_names)
        planner = _planner(reader, request)
        reader.read_data(planner.create_local_plan(), planner)

    group.gather(read)
    return Loaded(
        progress=SavedProgress(manifest.step, manifest.tokens, manifest.validation_loss, manifest.extra),
        path=str(folder),
        rank_states=manifest.rank_states,
        bytes_read=reader.bytes_read,
        missing=frozenset(request.state.keys() - manifest.state_names),
        unread=frozenset(manifest.state_names - request.state.keys()),
    )


def needed_files(folder: Folder, manifest: Manifest, request: LoadRequest) -> set[str]:
    """Names of the shards from which this rank reads."""
    reader = ShardReader(folder, manifest)
    return {reader.piece(item).file for item in _planner(reader, request).create_local_plan().items}


def _planner(reader: ShardReader, request: LoadRequest) -> DefaultLoadPlanner:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    present = {name: tensor for name, tensor in request.state.items() if name in reader.manifest.state_names}
    planner.set_up_planner(present, reader.read_metadata())
    return planner
