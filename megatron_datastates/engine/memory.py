"""The budget of staging memory: a share of the free host memory, divided by the ranks of this node.

Free memory is the least of the machine's MemAvailable and of what this process's memory cgroup and each
cgroup above it have left. Page cache that can be dropped at once counts as free, as in MemAvailable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from megatron_datastates.config import MIB, Options

_HOST_SLOT_BYTES, _DEVICE_SLOT_BYTES = 2 * MIB, 8 * MIB
_FEWEST_DEVICE_SLOTS = 8
POOL_SHARE = 0.25  # of the free memory, for all ranks of a node together
# Variables with the number of this job's processes on this node, set by torchrun, Open MPI, MPICH and Intel
# MPI, MVAPICH, PALS (Cray's mpiexec) and Slurm (with and without --ntasks-per-node). The launcher closest to
# the process comes first.
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_TASKS_PER_NODE",
)
_LIKELY_RANKS = 8  # on a node whose GPUs are not known
# The files of a memory cgroup: limits, usage, and the field of memory.stat that counts cache, including that
# of the groups below it.
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_NO_LIMIT = 1 << 63
_Group = tuple[Path, bool]  # folder, whether it is of version 2


def slot_bytes(options: Options, on_gpu_machine: bool) -> int:
    """Returns the size of a slot in bytes: the option's, or a default for this kind of machine.

    Writes are as fast with 2 MiB as with more (benchmarks.engine, --only sweep), and small slots need less
    memory. Copies from a device are better few and long, unless memory is short.
    """
    if options.slot_size:
        return options.slot_size
    short = 0 < options.staging_memory < _FEWEST_DEVICE_SLOTS * _DEVICE_SLOT_BYTES
    return _DEVICE_SLOT_BYTES if on_gpu_machine and not short else _HOST_SLOT_BYTES


def most_slots(staging_memory: int, slot_size: int, ranks: int) -> int:
    """Returns the slots in the budget, at least two; `staging_memory` 0 means a share of free memory."""
    budget = staging_memory or int(free_bytes() * POOL_SHARE / max(ranks, 1))
    return max(2, budget // slot_size)


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of this job's ranks on this node, or 1 if its launcher does not set it."""
    return _set_by_launcher(environment) or 1


def ranks_sharing_memory(
    environment: Mapping[str, str] = os.environ, gpus: Path = Path("/proc/driver/nvidia/gpus")
) -> int:
    """Returns `local_ranks`; if the launcher does not set it (Ray's workers), the most that is likely.

    That is one rank for each GPU of the machine, whichever this process sees. Where ranks are fewer, each has
    less staging memory than it might, which is safe.
    """
    world = environment.get("WORLD_SIZE", "")
    likely = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    most = min(int(world), likely or _LIKELY_RANKS) if world.isdecimal() else 1
    return _set_by_launcher(environment) or max(most, 1)


def _set_by_launcher(environment: Mapping[str, str]) -> int:
    for name in _LOCAL_RANKS:
        # Slurm writes "8(x2),4" if nodes differ; the largest number is the safe one.
        counts = re.findall(r"(?:^|,)\s*(\d+)", environment.get(name, ""))
        if any(map(int, counts)):
            return max(map(int, counts))
    return 0


def is_first_of_node(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this is the job's first rank on this node; False if its launcher does not say."""
    return environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID")) == "0"  # Slurm may start torchrun


def free_bytes(proc: Path = Path("/proc")) -> int:
    """Returns the bytes that this process may still allocate without swapping or being killed."""
    return max(0, min(_free_of_machine(proc), *map(_free_of_group, _groups(proc)), _NO_LIMIT))


def _free_of_machine(proc: Path) -> int:
    facts = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(facts["MemAvailable"].split()[0]) * 1024


def _groups(proc: Path) -> Iterator[_Group]:
    """Yields the memory cgroups of this process, its own first, as far up as they are visible."""
    own = _own_paths(proc)
    for line in _lines(proc / "self" / "mountinfo"):
        # 36 35 0:31 ROOT MOUNTPOINT options [optional fields] - TYPE source super-options
        before, _, after = line.partition(" - ")
        fields, (kind, *_, super_options) = before.split(), after.split()
        is_v2 = kind == "cgroup2"
        if is_v2 or (kind == "cgroup" and "memory" in super_options.split(",")):
            top = Path(unescaped(fields[4]))
            at = top / _below(own.get(is_v2, "/"), unescaped(fields[3]))
            # In a container, its own group may be mounted as the root, under a path of the host.
            at = at if at.is_dir() else top
            yield from ((group, is_v2) for group in (at, *at.parents) if group.is_relative_to(top))


def _own_paths(proc: Path) -> dict[bool, str]:
    """Returns this process's path in the hierarchies of version 2 (True) and version 1 (False)."""
    found = {}
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            found[number == "0"] = path
    return found


def _below(path: str, mounted: str) -> str:
    """Returns `path` relative to `mounted`, a folder of the same hierarchy; "." if it is not below it."""
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
    """Returns the number in a file of a cgroup; no limit if the file is missing or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return _NO_LIMIT


def _lines(path: Path) -> list[str]:
    try:
        text = os.fsdecode(path.read_bytes())  # names of mounts need not be UTF-8
    except OSError:
        return []
    return [line for line in text.split("\n") if line]


def unescaped(path: str) -> str:
    """Decodes the octal escapes of mountinfo, such as those of spaces."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), path)
