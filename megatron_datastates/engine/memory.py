"""How much host memory staging may take: a share of what is free, divided by the ranks of this node.

What is free is the least of what the machine says and of what this process's memory cgroup and each cgroup
above it has left. Page cache that can be dropped at once counts as free, as in MemAvailable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from megatron_datastates.config import MIB, Options

_HOST_SLOT_BYTES, _DEVICE_SLOT_BYTES = 2 * MIB, 8 * MIB
_FEWEST_DEVICE_SLOTS = 8
_SHARE = 0.25  # of the free memory, for all ranks of a node together
# Who says how many processes of this job run on this node: torchrun, Open MPI, Slurm (with and without
# --ntasks-per-node). The nearest to the process comes first.
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_TASKS_PER_NODE",
)
# The files of a memory cgroup: its limits, what it uses, and the name of cache in memory.stat, the groups
# below it included.
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_NO_LIMIT = 1 << 63
_Group = tuple[Path, bool]  # its folder, and whether it is of version 2


def slot_bytes(options: Options, on_gpu_machine: bool) -> int:
    """The size of a slot: the option's, or one that suits the machine.

    Writes are as fast with 2 MiB as with more (benchmarks.engine, --only sweep), and small slots need less
    memory. Copies from a device want fewer and longer operations, unless memory is short.
    """
    if options.slot_size:
        return options.slot_size
    short = 0 < options.staging_memory < _FEWEST_DEVICE_SLOTS * _DEVICE_SLOT_BYTES
    return _DEVICE_SLOT_BYTES if on_gpu_machine and not short else _HOST_SLOT_BYTES


def most_slots(staging_memory: int, slot_size: int, ranks: int) -> int:
    """Slots that the budget allows, at least two; `staging_memory` 0 means a share of the free memory."""
    budget = staging_memory or int(free_bytes() * _SHARE / max(ranks, 1))
    return max(2, budget // slot_size)


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks of this job on this node, as far as its launcher tells; else 1."""
    for name in _LOCAL_RANKS:
        # Slurm writes "8(x2),4" for nodes that differ; the most is the safe one.
        counts = re.findall(r"(?:^|,)\s*(\d+)", environment.get(name, ""))
        if any(map(int, counts)):
            return max(map(int, counts))
    return 1


def free_bytes(proc: Path = Path("/proc")) -> int:
    """Memory that this process may still take without swapping or being killed."""
    return max(0, min(_free_of_machine(proc), *map(_free_of_group, _groups(proc)), _NO_LIMIT))


def _free_of_machine(proc: Path) -> int:
    facts = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(facts["MemAvailable"].split()[0]) * 1024


def _groups(proc: Path) -> Iterator[_Group]:
    """The memory cgroups of this process, its own first, as far up as they can be seen."""
    own = _own_paths(proc)
    for line in _lines(proc / "self" / "mountinfo"):
        # 36 35 0:31 ROOT MOUNTPOINT options [optional fields] - TYPE source super-options
        before, _, after = line.partition(" - ")
        fields, (kind, *_, super_options) = before.split(), after.split()
        is_v2 = kind == "cgroup2"
        if is_v2 or (kind == "cgroup" and "memory" in super_options.split(",")):
            top = Path(_unescaped(fields[4]))
            at = top / _below(own.get(is_v2, "/"), _unescaped(fields[3]))
            # A container may see its own group mounted as if it were the root, under a path of the host's.
            at = at if at.is_dir() else top
            yield from ((group, is_v2) for group in (at, *at.parents) if group.is_relative_to(top))


def _own_paths(proc: Path) -> dict[bool, str]:
    """This process's path in the hierarchy of version 2 (True) and in that of version 1's memory (False)."""
    found = {}
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            found[number == "0"] = path
    return found


def _below(path: str, mounted: str) -> str:
    """`path` as seen below a mount of the folder `mounted` of the same hierarchy."""
    try:
        relative = PurePosixPath(path).relative_to(mounted)
    except ValueError:
        return "."
    return "." if ".." in relative.parts else str(relative)


def _free_of_group(group: _Group) -> int:
    folder, is_v2 = group
    limits, usage, cache = _V2 if is_v2 else _V1
    limit = min((_number(folder / name) for name in limits), default=_NO_LIMIT)
    used = _number(folder / usage)
    if limit >= _NO_LIMIT or used >= _NO_LIMIT:
        return _NO_LIMIT
    facts = dict(line.split() for line in _lines(folder / "memory.stat"))
    return limit - used + min(int(facts.get(cache, 0)), used)


def _number(path: Path) -> int:
    """What a file of a cgroup says; no limit if it is not there or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return _NO_LIMIT


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _unescaped(path: str) -> str:
    """As mountinfo wrote it: there, a space is its octal number."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), path)
