"""The nodes of the fast tier. A node is the set of ranks that see the same node-local folder."""

import socket
from pathlib import Path

from train.checkpoint.group import Group, attempt, results_of


class Nodes:
    """Which ranks are on which node. Collective to construct. Creates `folder` on every node."""

    def __init__(self, folder: Path, group: Group) -> None:
        identities = results_of(group.gather_all(attempt(lambda: _folder_identity(folder))))
        self.ranks: list[list[int]] = [
            [rank for rank, identity in enumerate(identities) if identity == node] for node in dict.fromkeys(identities)
        ]
        """Ranks of each node, in rank order."""
        own = self.node_of(group.rank)
        self.leader = self.ranks[own][0]
        """First rank of this rank's node; it looks after the node's folder."""
        self.is_leader = self.leader == group.rank

    def node_of(self, rank: int) -> int:
        """Number of the node of a rank."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def receiver(self, rank: int) -> int | None:
        """The rank of the next node that keeps a copy of this rank's shard; None if there is only one node."""
        if len(self.ranks) == 1:
            return None
        node = self.node_of(rank)
        peers = self.ranks[(node + 1) % len(self.ranks)]
        return peers[self.ranks[node].index(rank) % len(peers)]


def _folder_identity(path: Path) -> tuple[str, str, int, int]:
    """Equal on all ranks that see the same folder. Creates the folder."""
    path.mkdir(parents=True, exist_ok=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot, path.stat().st_dev, path.stat().st_ino
