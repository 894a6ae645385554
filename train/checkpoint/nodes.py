"""The nodes of the fast tier. A node is the set of ranks that see the same node-local folder."""

import socket
from pathlib import Path

from train.checkpoint.group import Group, attempt, results_of
from train.checkpoint.private_folder import make_private


class Nodes:
    """Which ranks are on which node. Collective to construct. Creates `folder` on every node."""

    def __init__(self, folder: Path, group: Group) -> None:
        identities = results_of(group.gather_all(attempt(lambda: _folder_identity(folder))))
        by_identity: dict[tuple[str, str, int, int], list[int]] = {}
        for rank, identity in enumerate(identities):
            by_identity.setdefault(identity, []).append(rank)
        self.ranks = list(by_identity.values())
        """Ranks of each node, in rank order."""
        self._places = {
            rank: (number, place) for number, ranks in enumerate(self.ranks) for place, rank in enumerate(ranks)
        }
        own = self.node_of(group.rank)
        self.leader = self.ranks[own][0]
        """First rank of this rank's node; it looks after the node's folder."""
        self.is_leader = self.leader == group.rank

    def node_of(self, rank: int) -> int:
        """Number of the node of a rank."""
        return self._places[rank][0]

    def receiver(self, rank: int) -> int | None:
        """The rank of the next node that keeps a copy of this rank's shard; None if there is only one node."""
        if len(self.ranks) == 1:
            return None
        node, place = self._places[rank]
        peers = self.ranks[(node + 1) % len(self.ranks)]
        return peers[place % len(peers)]


def _folder_identity(path: Path) -> tuple[str, str, int, int]:
    """Equal on all ranks that see the same folder. Creates the folder."""
    make_private(path)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot, path.stat().st_dev, path.stat().st_ino
