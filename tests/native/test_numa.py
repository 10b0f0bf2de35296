"""Staging memory and copying threads near the device: where sysfs names its NUMA node, and nowhere else."""

import ctypes
import errno
import os
import re
from pathlib import Path

import pytest

from megatron_datastates.engine import _native as native
from megatron_datastates.engine._native import Milestone
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.harness import (
    MIB,
    Copy,
    Engines,
    Request,
    Save,
    finish_read,
    make_reader,
    random_bytes,
    start_read,
    threads_named,
)
from tests.support.waiting import eventually

BUS_ID, FOLDER = "0000:0A:00.0", "0000:0a:00.0"
OURS = os.sched_getaffinity(0)
FIRST = min(OURS)
MBIND = {"x86_64": 237, "aarch64": 235}.get(os.uname().machine, 0)


def make_sysfs(root: Path, node: str = "0", cpus: str = str(FIRST)) -> Path:
    """Makes a tree with one device on `node`, and the CPUs of node 0."""
    device, nodes = root / "bus/pci/devices" / FOLDER, root / "devices/system/node/node0"
    for folder in (device, nodes):
        folder.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (nodes / "cpulist").write_text(f"{cpus}\n")
    return root


def allowed(task: Path) -> set[int]:
    """Returns the CPUs that a thread may run on."""
    (text,) = re.findall(r"Cpus_allowed_list:\s*(\S*)", (task / "status").read_text())
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def preferring(node: int) -> int:
    """Mappings of this process whose pages are to come from that node."""
    path = Path("/proc/self/numa_maps")
    if not path.exists():
        pytest.skip("this kernel has no numa_maps")
    return len(re.findall(rf"(?m)^\w+ prefer(?: \(many\))?:{node} ", path.read_text()))


def need_mbind() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(MBIND, None, 0, 0, None, 0, 0) != 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
        pytest.skip("mbind is not permitted here")


@pytest.fixture(autouse=True)
def place(cuda: FakeCuda) -> None:
    cuda.set_bus_id(BUS_ID)


def staged(engine: native.Engine, cuda: FakeCuda, folder: Path) -> None:
    """Saves so much that every thread of the engine has called the device's driver."""
    copies = [Copy(random_bytes(16 * MIB), 0, device=True)]
    Save(engine, folder / "data", copies, stream=cuda.new_stream()).finish()


def workers() -> list[Path]:
    return [task for name in ("ds-stage", "ds-await", "ds-write") for task in threads_named(name)]


def test_threads_that_copied_run_on_the_cpus_of_the_node(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine = device_engines(
        sysfs=str(make_sysfs(tmp_path / "sys")), copy_threads=1, write_threads=1, slot_bytes=MIB
    )
    staged(engine, cuda, tmp_path)
    eventually(lambda: [allowed(task) for task in workers()] == [{FIRST}] * 3, "all run there")
    assert os.sched_getaffinity(0) == OURS, "the trainer's own thread is left alone"


def test_memory_made_before_the_device_was_known_is_bound_before_it_is_page_locked(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    need_mbind()
    engine = device_engines(sysfs=str(make_sysfs(tmp_path / "sys")), slot_bytes=MIB, most_slots=8)
    engine.grow(4)
    eventually(lambda: engine.pool()["slots"] == 4, "slots")
    assert preferring(0) == 0
    cuda.hold_call("cuMemHostRegister")
    assert engine.page_lock_pool()
    eventually(lambda: cuda.calls("cuMemHostRegister"), "page-locking")
    assert preferring(0) == 1
    cuda.release_call("cuMemHostRegister")
    engine.grow(8)
    eventually(lambda: engine.pool()["page_locked_bytes"] == 8 * MIB, "all of it")
    assert preferring(0) >= 1  # neighbours with one policy are one mapping


@pytest.mark.parametrize("node", ["-1", "", "zero", "0 1", "5000", "99999999999999999999"])
def test_a_node_that_is_unknown_changes_nothing(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, node: str
) -> None:
    engine = device_engines(sysfs=str(make_sysfs(tmp_path / "sys", node=node)), slot_bytes=MIB)
    staged(engine, cuda, tmp_path)
    assert all(allowed(task) == OURS for task in workers())
    assert preferring(0) == 0


@pytest.mark.parametrize("cpus", [str(max(OURS) + 1), "8191", "", "8192", "0-", "-1", "3-0", "x", ",0"])
def test_cpus_that_are_not_ours_or_no_numbers_change_no_thread(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, cpus: str
) -> None:
    engine = device_engines(sysfs=str(make_sysfs(tmp_path / "sys", cpus=cpus)), slot_bytes=MIB)
    staged(engine, cuda, tmp_path)
    assert all(allowed(task) == OURS for task in workers())


@pytest.mark.parametrize(
    ("bus_id", "is_found"),
    [
        ("00000000:0A:00.0", True),  # as nvidia-smi writes it
        ("0000:0a:00.0", True),
        ("0001:0A:00.0", False),
        ("", False),
        ("../../../../0000:0a:00.0", False),
        ("..", False),
    ],
)
def test_bus_ids(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, bus_id: str, is_found: bool
) -> None:
    cuda.set_bus_id(bus_id)
    engine = device_engines(sysfs=str(make_sysfs(tmp_path / "sys")), copy_threads=1, slot_bytes=MIB)
    staged(engine, cuda, tmp_path)
    (task,) = threads_named("ds-stage")
    assert allowed(task) == ({FIRST} if is_found else OURS)


def test_a_driver_that_knows_no_bus_ids_will_do(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    cuda.hide("cuDeviceGetPCIBusId")
    engine = device_engines(sysfs=str(make_sysfs(tmp_path / "sys")), slot_bytes=MIB)
    staged(engine, cuda, tmp_path)
    assert all(allowed(task) == OURS for task in workers())


def test_threads_that_read_to_a_device_run_on_the_cpus_of_the_node(cuda: FakeCuda, tmp_path: Path) -> None:
    data = random_bytes(4 * MIB)
    (tmp_path / "data").write_bytes(data.tobytes())
    target = data * 0
    reader = make_reader(threads=1, driver=cuda.path, sysfs=str(make_sysfs(tmp_path / "sys")))
    request = Request(0, 4 * MIB, target.ctypes.data, device=True)
    cuda.hold_call("cuMemcpyHtoDAsync")
    job = start_read(reader, [(str(tmp_path / "data"), 4 * MIB, b"")], [request], stream=cuda.new_stream())
    eventually(lambda: cuda.calls("cuMemcpyHtoDAsync"), "the thread copies")
    (task,) = threads_named("ds-read")
    assert allowed(task) == {FIRST}
    cuda.release_call("cuMemcpyHtoDAsync")
    assert finish_read(job)[1:] == ([], "")
    assert (target == data).all()


def test_saves_of_host_memory_leave_threads_where_they_are(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    engine = device_engines(sysfs=str(make_sysfs(tmp_path / "sys")), slot_bytes=MIB)
    save = Save(engine, tmp_path / "data", [Copy(random_bytes(8 * MIB), 0)])
    save.finish()
    assert save.reaches(Milestone.RELEASED)
    assert all(allowed(task) == OURS for task in workers())
