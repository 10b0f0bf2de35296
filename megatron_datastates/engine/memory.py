"""How much host memory staging may take."""

from __future__ import annotations

from pathlib import Path

_SHARE = 0.25  # of the free memory, for all ranks of a node together
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Memory that this process may still take: the machine's, or the cgroup's if that is less."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) * 1024
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(limit - used, 0))
    return free


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None


def most_slots(staging_memory: int, slot_bytes: int, local_ranks: int) -> int:
    """Slots that the budget allows, at least two; `staging_memory` 0 means a share of the free memory."""
    budget = staging_memory or int(free_bytes() * _SHARE / max(local_ranks, 1))
    return max(2, budget // slot_bytes)
