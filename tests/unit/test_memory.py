"""The budget of staging memory: what is free for this process, in whatever cgroups it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_datastates.config import GIB, MIB, Options
from megatron_datastates.engine.memory import (
    _groups,
    free_bytes,
    is_first_of_node,
    local_ranks,
    most_slots,
    ranks_sharing_memory,
    slot_bytes,
)

UNLIMITED_V1 = 9223372036854771712


class Machine:
    """A /proc and cgroup mounts below one folder."""

    def __init__(self, folder: Path, available: int = 100 * GIB) -> None:
        self.proc, self._mounts, self._folder = folder / "proc", list[str](), folder
        (self.proc / "self").mkdir(parents=True)
        kib = available // 1024
        (self.proc / "meminfo").write_text(f"MemTotal:  {kib * 2} kB\nMemAvailable:  {kib} kB\n")

    def runs_in(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("".join(line + "\n" for line in lines))

    def mount(self, name: str, kind: str, options: str = "rw", root: str = "/") -> Path:
        """Makes a mount of the folder `root` of a hierarchy; returns its place."""
        point = self._folder / "cgroup mounts" / name
        point.mkdir(parents=True)
        escaped = str(point).replace(" ", r"\040")
        self._mounts.append(f"36 31 0:32 {root} {escaped} rw,relatime shared:1 - {kind} source {options}\n")
        (self.proc / "self" / "mountinfo").write_text("".join(self._mounts))
        return point

    def free(self) -> int:
        return free_bytes(self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v1(folder: Path, limit: int, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_rss 1\ntotal_inactive_file {cache}\n")


def v2(folder: Path, limit: int | str, used: int, cache: int = 0, high: int | str = "max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_without_cgroups_it_is_what_the_machine_has(machine: Machine) -> None:
    assert machine.free() == 100 * GIB


def test_v2_own_group_is_found(machine: Machine) -> None:
    machine.runs_in("0::/job/rank0")
    v2(machine.mount("unified", "cgroup2") / "job" / "rank0", 10 * GIB, 4 * GIB)
    assert machine.free() == 6 * GIB


@pytest.mark.parametrize(("job", "machine_free", "wanted"), [(8, 100, 3), (20, 100, 6), (20, 2, 2)])
def test_the_least_of_all_levels_counts(tmp_path: Path, job: int, machine_free: int, wanted: int) -> None:
    machine = Machine(tmp_path, machine_free * GIB)
    machine.runs_in("0::/slice/job/rank0")
    top = machine.mount("unified", "cgroup2")
    v2(top / "slice" / "job" / "rank0", 10 * GIB, 4 * GIB)
    v2(top / "slice" / "job", job * GIB, 5 * GIB)
    v2(top / "slice", "max", 90 * GIB)
    assert machine.free() == wanted * GIB


def test_v2_root_of_a_container_has_limits_of_its_own(machine: Machine) -> None:
    machine.runs_in("0::/")
    v2(machine.mount("unified", "cgroup2"), 10 * GIB, 4 * GIB)
    assert machine.free() == 6 * GIB


def test_v2_above_high_the_kernel_reclaims(machine: Machine) -> None:
    machine.runs_in("0::/job")
    v2(machine.mount("unified", "cgroup2") / "job", 10 * GIB, 4 * GIB, high=7 * GIB)
    assert machine.free() == 3 * GIB


@pytest.mark.parametrize("name", [b"donn\xe9es", b"a\x0bb", "a\u2028b".encode()])
def test_mounts_of_any_name_are_passed_over(machine: Machine, name: bytes) -> None:
    machine.runs_in("0::/")
    v2(machine.mount("unified", "cgroup2"), 10 * GIB, 4 * GIB)
    mounts = machine.proc / "self" / "mountinfo"
    mounts.write_bytes(b"41 31 8:1 / /mnt/" + name + b" rw - ext4 /dev/sda1 rw\n" + mounts.read_bytes())
    assert machine.free() == 6 * GIB


def test_v1_nested_group_is_found(machine: Machine) -> None:
    machine.runs_in("4:cpu,memory:/batch/job 7", "3:cpuset:/", "0::/")
    machine.mount("unified", "cgroup2")
    machine.mount("cpuset", "cgroup", "rw,cpuset")
    memory = machine.mount("memory", "cgroup", "rw,cpu,memory")
    v1(memory, UNLIMITED_V1, 50 * GIB)
    v1(memory / "batch", 30 * GIB, 28 * GIB)
    v1(memory / "batch" / "job 7", 10 * GIB, 1 * GIB)
    assert machine.free() == 2 * GIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_page_cache_is_free(machine: Machine, version: str) -> None:
    machine.runs_in("4:memory:/job", "0::/job")
    if version == "v1":
        v1(machine.mount("memory", "cgroup", "rw,memory") / "job", 10 * GIB, 9 * GIB, cache=5 * GIB)
    else:
        v2(machine.mount("unified", "cgroup2") / "job", 10 * GIB, 9 * GIB, cache=5 * GIB)
    assert machine.free() == 6 * GIB


def test_a_group_beyond_its_limit_has_nothing(machine: Machine) -> None:
    machine.runs_in("0::/job")
    v2(machine.mount("unified", "cgroup2") / "job", 10 * GIB, 11 * GIB)
    assert machine.free() == 0


def test_container_that_mounts_its_group_as_the_root_of_v1(machine: Machine) -> None:
    """Docker: the path is the host's, and the mount says which folder of the hierarchy it shows."""
    machine.runs_in("4:memory:/docker/0123/inner")
    memory = machine.mount("memory", "cgroup", "ro,memory", root="/docker/0123")
    v1(memory, 20 * GIB, 1 * GIB)
    v1(memory / "inner", 10 * GIB, 1 * GIB)
    assert machine.free() == 9 * GIB


@pytest.mark.parametrize("path", ["/kubepods/pod1/0123", "/../../job", "/gone"])
@pytest.mark.parametrize("root", ["/", "/../..", "/other"])
def test_path_that_cannot_be_seen_means_the_group_that_is_mounted(
    machine: Machine, path: str, root: str
) -> None:
    machine.runs_in(f"4:memory:{path}", f"0::{path}")
    machine.mount("unified", "cgroup2", root=root)
    v1(machine.mount("memory", "cgroup", "rw,memory", root=root), 10 * GIB, 1 * GIB)
    assert machine.free() == 9 * GIB


def test_files_that_say_nothing_limit_nothing(machine: Machine) -> None:
    machine.runs_in("0::/job")
    group = machine.mount("unified", "cgroup2") / "job"
    group.mkdir()
    assert machine.free() == 100 * GIB
    (group / "memory.max").write_text(f"{GIB}\n")  # and no word of what is used
    assert machine.free() == 100 * GIB


def test_this_machine_says_something_sensible() -> None:
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert MIB < free_bytes() <= int(facts["MemTotal"].split()[0]) * 1024


def test_this_process_is_in_the_group_that_is_found_on_this_machine() -> None:
    """The group of version 1's memory counts, or that of version 2 if it limits memory."""
    found = {is_v2: group for group, is_v2 in reversed(list(_groups(Path("/proc"))))}
    group = found.get(False, found.get(True))
    if group is None or not (group / "cgroup.procs").is_file():
        pytest.skip("no memory cgroup is mounted here")
    assert str(os.getpid()) in (group / "cgroup.procs").read_text().split()


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),  # torchrun, started by Slurm
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_NTASKS_PER_NODE": "1"}, 4),
        ({"MPI_LOCALNRANKS": "4", "SLURM_NTASKS_PER_NODE": "1"}, 4),  # MPICH, in an allocation of Slurm
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "8"}, 8),
        ({"PALS_LOCAL_SIZE": "12"}, 12),
        ({"SLURM_NTASKS_PER_NODE": "6"}, 6),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),8,2"}, 8),
        ({"LOCAL_WORLD_SIZE": "", "OMPI_COMM_WORLD_LOCAL_SIZE": "x", "SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "-3"}, 1),
    ],
)
def test_launchers_say_how_many_ranks_share_the_node(environment: Mapping[str, str], ranks: int) -> None:
    assert local_ranks(environment) == ranks


@pytest.mark.parametrize(
    ("environment", "gpus", "ranks"),
    [
        ({}, 8, 1),
        ({"WORLD_SIZE": "64"}, 4, 4),
        ({"WORLD_SIZE": "64"}, 0, 8),  # no GPU, or not NVIDIA's
        ({"WORLD_SIZE": "2"}, 8, 2),
        ({"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "2"}, 8, 2),
        ({"WORLD_SIZE": "many"}, 8, 1),
        ({"WORLD_SIZE": "0"}, 8, 1),
    ],
)
def test_ranks_of_unknown_number_share_memory_as_one_for_each_gpu(
    environment: Mapping[str, str], gpus: int, ranks: int, tmp_path: Path
) -> None:
    for number in range(gpus):
        (tmp_path / "gpus" / f"0000:{number:02}:00.0").mkdir(parents=True)
    assert ranks_sharing_memory(environment, tmp_path / "gpus") == ranks


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [((8 * MIB, MIB, 8), 8), ((8 * MIB, 16 * MIB, 1), 2), ((0, 10 * GIB, 1), 2)],
)
def test_memory_that_was_chosen_is_taken_as_it_is(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[int], slots: int
) -> None:
    monkeypatch.setattr("megatron_datastates.engine.memory.free_bytes", lambda: 20 * GIB)
    assert most_slots(*arguments) == slots


def test_a_quarter_of_what_is_free_is_shared_by_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_datastates.engine.memory.free_bytes", lambda: 64 * GIB)
    assert most_slots(0, MIB, 1) == 16 * 1024
    assert most_slots(0, MIB, 8) == 2 * 1024


@pytest.mark.parametrize(
    ("options", "with_gpu", "without"),
    [
        (Options(), 8, 2),
        (Options(staging_memory=1024 * MIB), 8, 2),
        (Options(staging_memory=64 * MIB), 8, 2),
        (Options(staging_memory=63 * MIB), 2, 2),  # too few slots would be left
        (Options(staging_memory=8 * MIB), 2, 2),
        (Options(slot_size=MIB), 1, 1),
        (Options(slot_size=16 * MIB), 16, 16),
    ],
)
def test_slots_are_larger_where_there_is_a_gpu(options, with_gpu, without):
    sizes = [slot_bytes(options, on_gpu_machine=has_gpu) for has_gpu in (True, False)]
    assert sizes == [with_gpu * MIB, without * MIB]


def test_the_first_rank_of_a_node_is_the_launchers() -> None:
    assert is_first_of_node({"LOCAL_RANK": "0"}) and is_first_of_node({"SLURM_LOCALID": "0"})
    assert not is_first_of_node({}) and not is_first_of_node({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"})
