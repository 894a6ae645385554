"""Finds the rank that did not join a collective, from the record that torch keeps of each rank's collectives.

torch's flight recorder numbers the collectives of each process group. On a device, all ranks of a hanging run may wait
at the same line for the device, so their locations name nobody. Their numbers do: the others have entered a collective
that the late rank has not. The records are read as JSON, never as a pickle. No input or output happens here, except in
`dump`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

BACKENDS = ("gloo", "nccl")
SHOWN = 8
"""Late ranks that a message lists."""


@dataclass(frozen=True)
class GroupRecord:
    """What one rank did in one process group."""

    name: str
    """Name of the group and its backend, the same on its ranks and on no others."""
    about: str = ""
    """torch's description of the group, such as `mesh_shard`; "" if it was not used."""
    joined: int = 0
    """Number of the last collective that this rank has entered; 0: none."""
    waits_in: str = ""
    """The collective `joined`, with the sizes of its input, if it has not ended; else ""."""


@dataclass(frozen=True)
class Late:
    """The ranks that did not join a collective in which others wait."""

    ranks: tuple[int, ...]
    reason: str


def dump() -> dict[str, Any]:
    """Return the flight recorder's entries: of NCCL where torch has it, and of gloo. {} if torch keeps none."""
    from torch._C import _distributed_c10d as c10d

    found: dict[str, Any] = {"entries": []}
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        read = getattr(c10d, name, None)
        if read is not None:
            found["entries"] += json.loads(read(True, False)).get("entries", [])
    return found


def group_names() -> dict[str, str]:
    """Return this rank's process groups: torch's name of each, and a name that no other ranks use."""
    world = dist.distributed_c10d._world  # pyright: ignore[reportPrivateUsage]
    members = ((name, world.pg_group_ranks[group]) for group, name in world.pg_names.items())
    return {name: f"{name}/{min(ranks)}/{len(ranks)}" for name, ranks in members if ranks}


def read_records(trace: Mapping[str, Any], names: Mapping[str, str]) -> list[GroupRecord]:
    """Return what this rank did in each of its groups, from the recorder's entries. `names`: see `group_names`.

    A group has a record for each backend, because each backend numbers its own collectives."""
    entries: dict[tuple[str, str], list[Mapping[str, Any]]] = {
        (name, backend): [] for name in names for backend in BACKENDS
    }
    for entry in trace.get("entries", []):
        key = entry["process_group"][0], entry["profiling_name"].partition(":")[0]
        if key in entries and not entry["is_p2p"]:
            entries[key].append(entry)
    return [_of_group(f"{names[name]}/{backend}", found) for (name, backend), found in entries.items()]


def _of_group(name: str, entries: Sequence[Mapping[str, Any]]) -> GroupRecord:
    # A device starts a collective when its turn comes. Where that is recorded, a queued one counts as not entered.
    knows_starts = any(entry.get("time_discovered_started_ns") for entry in entries)
    entered = [entry for entry in entries if not knows_starts or entry["state"] != "scheduled"]
    if not entered:
        return GroupRecord(name)
    last = max(entered, key=lambda entry: entry["collective_seq_id"])
    has_ended = last["state"] == "completed" or (last["retired"] and not last["profiling_name"].startswith("nccl:"))
    waits_in = "" if has_ended else f"{last['profiling_name']} of {last['input_sizes']}"
    return GroupRecord(name, last["process_group"][1], last["collective_seq_id"], waits_in)


def find_late(records_by_rank: Mapping[int, Sequence[GroupRecord]]) -> Late | None:
    """Return the ranks that others wait for; None if all ranks have entered the same collectives.

    A late rank that itself waits for another late rank is not the cause."""
    by_group: dict[str, dict[int, GroupRecord]] = {}
    for rank, records in records_by_rank.items():
        for record in records:
            by_group.setdefault(record.name, {})[rank] = record
    late = {name: found for name, records in by_group.items() if (found := _late_in(records))}
    suspects = sorted(set[int]().union(*late.values()))
    causes = [
        rank
        for rank in suspects
        if not any(record.waits_in and late.get(record.name, set[int]()) - {rank} for record in records_by_rank[rank])
    ]
    for name, ranks in late.items():
        if blamed := tuple(rank for rank in causes or suspects if rank in ranks):
            return Late(blamed, _reason(blamed, by_group[name]))
    return None


def _late_in(records: Mapping[int, GroupRecord]) -> set[int]:
    """Return the ranks that have not entered the collective in which others of their group wait."""
    newest = max((record.joined for record in records.values() if record.waits_in), default=0)
    return {rank for rank, record in records.items() if record.joined < newest}


def _reason(ranks: Sequence[int], records: Mapping[int, GroupRecord]) -> str:
    waiting = [record for record in records.values() if record.waits_in and record.joined > records[ranks[0]].joined]
    first = min(waiting, key=lambda record: record.joined)
    listed = ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")
    return (
        f"{'rank' if len(ranks) == 1 else 'ranks'} {listed} did not join {first.waits_in} (collective {first.joined} "
        f"of the group {first.about}), in which {len(waiting)} of its {len(records)} ranks wait"
    )
