"""Fills the state from one checkpoint: each rank reads the parts that DCP's load planner says are its own."""

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from train.checkpoint.format.manifest import RNG_PREFIX, Manifest, Piece
from train.checkpoint.group import Group
from train.checkpoint.saved_state import Loaded, SavedProgress, Wanted
from train.checkpoint.shards import ShardReader
from train.checkpoint.stores.protocol import Folder


def fill(folder: Folder, group: Group, manifest: Manifest, wanted: Wanted) -> Loaded:
    """Each rank reads its part. DCP's load plans need no word from other ranks; its failures do. Collective."""
    reader = ShardReader(folder, manifest, group.alive)
    random: list[bytes] = []

    def read() -> None:
        planner = _planner(reader, wanted)
        reader.read_data(planner.create_local_plan(), planner)
        if piece := _random_piece(manifest, wanted, group.rank):
            random.append(reader.read_whole(piece))

    group.gather(read)
    return Loaded(
        progress=SavedProgress(manifest.step, manifest.tokens, manifest.validation_loss, manifest.extra),
        path=str(folder),
        rank_states=manifest.rank_states,
        layout=manifest.layout,
        bytes_read=reader.bytes_read,
        random=random[0] if random else None,
    )


def needed_files(folder: Folder, manifest: Manifest, wanted: Wanted, rank: int) -> set[str]:
    """The shards that a rank reads from."""
    reader = ShardReader(folder, manifest)
    needed = {reader.piece(item).file for item in _planner(reader, wanted).create_local_plan().items}
    piece = _random_piece(manifest, wanted, rank)
    return needed | ({piece.file} if piece else set())


def _planner(reader: ShardReader, wanted: Wanted) -> DefaultLoadPlanner:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    present = {name: tensor for name, tensor in wanted.state.items() if name in reader.manifest.state_names}
    planner.set_up_planner(present, reader.read_metadata())
    return planner


def _random_piece(manifest: Manifest, wanted: Wanted, rank: int) -> Piece | None:
    """A rank's random state, if the layout is the one that it belongs to."""
    pieces = manifest.pieces.get(f"{RNG_PREFIX}{rank:05d}") if manifest.layout == wanted.layout else None
    return pieces[0] if pieces else None
