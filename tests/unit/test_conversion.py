"""Conversion between formats: what DCP writes and what we write, without Megatron."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_datastates.config import MIB
from megatron_datastates.convert import datastates, job
from megatron_datastates.convert.archives import open_archive, write_archive
from megatron_datastates.convert.job import Means, Plan, convert, plan_conversion
from megatron_datastates.convert.run import Wish, convert_run
from megatron_datastates.convert.source import Source, open_source
from megatron_datastates.convert.team import Team
from megatron_datastates.errors import CorruptDataError, DataStatesError, FormatError, StorageError
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.values import OPTIMIZER_MAP_NAME
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.verify import verify
from tests.unit.states import KNOWN_DTYPES, bits, data_files, new_saver, random_tensor, save

LEAST = Means(memory_bytes=66 * MIB, workers=1)  # windows of 15 MiB
State = dict[str, Any]


def dcp_state() -> State:
    """Every dtype, shapes without elements and without axes, transposed memory, views of larger memory."""
    tensors = {
        f"of.{name}": random_tensor(getattr(torch, name), (3, 5), n) for n, name in enumerate(KNOWN_DTYPES)
    }
    tensors |= {
        "large": random_tensor(torch.float32, (5 * MIB, 1), 1),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(1.5),
        "transposed": random_tensor(torch.bfloat16, (70, 33, 5), 2).permute(2, 0, 1),
    }
    return tensors


def save_with_dcp(directory: Path, state: State, **how: Any) -> None:
    writer = dcp.FileSystemWriter(directory, **how)
    dcp.save(state, storage_writer=writer, no_dist=True)


@pytest.fixture(scope="module")
def by_dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "iter_0000012"
    save_with_dcp(directory, dcp_state() | {"object": "words"}, single_file_per_rank=False)
    return directory


def convert_to(source: Path, target: Path, means: Means = LEAST, **how: Any) -> Source:
    keys = ("format", "ranks")
    plan = plan_conversion(open_source(source), target, **{k: v for k, v in how.items() if k in keys})
    convert(plan, means, **{k: v for k, v in how.items() if k not in keys})
    return open_source(target)


def contents(source: Source) -> dict[str, Any]:
    """Bits of every tensor and object."""
    tensors = {
        key: (entry.dtype, entry.global_shape, bits(source.read_tensor(key)))
        for key, entry in source.tensors.items()
    }
    return tensors | {f"object {key}": source.read_object(key) for key in source.objects}


# -- there and back -------------------------------------------------------------------------------------


def test_what_dcp_wrote_is_read_bit_for_bit(by_dcp: Path) -> None:
    source = open_source(by_dcp)
    state = dcp_state()
    assert source.format == "torch_dist"
    assert set(source.tensors) == set(state) and source.objects == ["object"]
    for key, tensor in state.items():
        read = source.read_tensor(key)
        assert (read.dtype, read.shape, bits(read)) == (tensor.dtype, tensor.shape, bits(tensor)), key
    part = source.read_tensor("transposed", (1, 7, 3), (2, 50, 30))
    assert bits(part) == bits(state["transposed"][1:3, 7:57, 3:33])


def test_there_and_back_everything_is_the_same(by_dcp: Path, tmp_path: Path) -> None:
    ours = convert_to(by_dcp, tmp_path / "ours")
    back = convert_to(tmp_path / "ours", tmp_path / "back")
    assert (ours.format, back.format) == ("datastates", "torch_dist")
    assert contents(ours) == contents(back) == contents(open_source(by_dcp))
    verdict = verify(tmp_path / "ours")
    assert verdict.good and verdict.unchecked_files == 0, verdict.faults
    assert Checkpoint.open(tmp_path / "ours").manifest.iteration == 12


def test_dcp_loads_what_was_converted_for_it(by_dcp: Path, tmp_path: Path) -> None:
    convert_to(by_dcp, tmp_path / "ours")
    convert_to(tmp_path / "ours", tmp_path / "back")
    before = dcp_state()
    state = {key: torch.zeros_like(tensor) for key, tensor in before.items()} | {"object": None}
    dcp.load(state, checkpoint_id=tmp_path / "back", no_dist=True)
    assert {key: bits(state[key]) for key in before} == {key: bits(before[key]) for key in before}
    assert state["object"] == "words"


def test_a_tensor_larger_than_the_memory_goes_through_windows(
    by_dcp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest: list[int] = []
    monkeypatch.setattr(job, "_MOST_WINDOW_BYTES", MIB)
    for kind in (type(open_source(by_dcp)), type(convert_to(by_dcp, tmp_path / "first"))):
        read = kind.read_pieces

        def noted(self: Source, pieces: Any, window: Any, read: Any = read) -> None:
            largest.append(len(window))
            read(self, pieces, window)

        monkeypatch.setattr(kind, "read_pieces", noted)
    convert_to(by_dcp, tmp_path / "ours", verify=True)
    convert_to(tmp_path / "ours", tmp_path / "back", verify=True)
    assert max(largest) <= MIB and len(largest) > 4 * 20
    monkeypatch.undo()
    assert contents(open_source(tmp_path / "back")) == contents(open_source(by_dcp))


def test_an_object_larger_than_a_window_is_whole_and_gaps_are_zero(
    by_dcp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "source", dcp_state() | {"object": os.urandom(3 * MIB)})
    monkeypatch.setattr(job, "_MOST_WINDOW_BYTES", MIB)
    monkeypatch.setattr(datastates.np, "empty", lambda count, dtype: np.full(count, 0xAA, dtype))
    made = convert_to(tmp_path / "source", tmp_path / "made")
    assert made.read_object("object") == open_source(tmp_path / "source").read_object("object")
    (file,) = data_files(tmp_path / "made")
    rest = bytearray(file.read_bytes())
    for entry in Checkpoint.open(tmp_path / "made").index.tensors.values():
        for at, size in zip(entry.file_offsets.tolist(), entry.file_bytes.tolist(), strict=True):
            rest[at : at + size] = bytes(size)
    footer = Checkpoint.open(tmp_path / "made").footer(0)
    objects = min(extent.offset for extent in footer.objects.values())
    assert not any(rest[HEADER_BYTES:objects])


def test_the_first_error_stops_all_workers() -> None:
    workers, started = job._Workers(2, job.nothing_told), threading.Event()

    def work(number: int) -> None:
        if number == 0:
            assert started.wait(60)
            raise OSError("first")
        started.set()
        while True:
            workers.moved(0)

    with pytest.raises(OSError, match="first"):
        workers.run(range(2), work)


def test_companions_and_megatrons_own_file_come_along(by_dcp: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_with_dcp(source, {"a": torch.ones(3)})
    (source / "common.pt").write_bytes(b"common")
    (source / "modelopt_state").mkdir()
    (source / "modelopt_state" / "state").write_bytes(b"state")
    (source / "integrity.json").write_text("{}")  # hashes of files that are not there any more
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    convert_to(source, tmp_path / "ours")
    assert Checkpoint.open(tmp_path / "ours").read_other("common.pt") == b"common"
    convert_to(tmp_path / "ours", tmp_path / "back", verify=True)
    for directory, name in (("ours", "datastates"), ("back", "torch_dist")):
        made = tmp_path / directory
        assert (made / "common.pt").read_bytes() == b"common"
        assert (made / "modelopt_state" / "state").read_bytes() == b"state"
        assert not (made / "integrity.json").exists()
        assert f'"sharded_backend": "{name}"' in (made / "metadata.json").read_text()
        assert '"common_backend": "torch"' in (made / "metadata.json").read_text()


def test_the_optimizer_map_is_for_us_alone(tmp_path: Path) -> None:
    key = f"optimizer.{OPTIMIZER_MAP_NAME}/shard_0_1"
    saver = new_saver()
    save(saver, tmp_path / "ours", {"a": torch.ones(3)}, {key: [1], "other/shard_0_1": [2]})
    saver.close()
    back = convert_to(tmp_path / "ours", tmp_path / "back", verify=True)
    assert list(back.objects) == ["other/shard_0_1"]
    assert sorted(convert_to(tmp_path / "ours", tmp_path / "same", format="datastates").objects) == [
        key,
        "other/shard_0_1",
    ]


@pytest.mark.parametrize("ranks", [1, 3, 1000])
@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_fragments_are_dealt_out_to_files_by_their_bytes(
    by_dcp: Path, tmp_path: Path, ranks: int, format: str
) -> None:
    made = convert_to(by_dcp, tmp_path / "made", Means(workers=3), ranks=ranks, format=format, verify=True)
    assert contents(made) == contents(open_source(by_dcp))
    files = made.stored_by_rank()
    assert len(files) == min(ranks, sum(len(file.fragments) for file in files))
    if ranks == 3:
        held = [sum(made.fragment(*one).bytes for one in file.fragments) for file in files]
        assert max(held) == 20 * MIB, "the large one is alone"


# -- archives of torch.save -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", KNOWN_DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)])
def test_torch_loads_an_archive_that_we_wrote(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = random_tensor(getattr(torch, name), shape)
    data = torch.frombuffer(bytearray(bits(tensor)), dtype=torch.uint8).numpy() if tensor.numel() else b""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"before")  # an archive begins anywhere
        write_archive(file, name, shape, [data[:1], data[1:]] if len(data) else [])  # type: ignore[list-item]
    loaded = torch.load(io.BytesIO(path.read_bytes()[6:]), weights_only=True)
    assert (loaded.dtype, loaded.shape, bits(loaded)) == (tensor.dtype, tensor.shape, bits(tensor))


def archive_of(value: Any, tmp_path: Path) -> Callable[[], Any]:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path = tmp_path / "file"
    path.write_bytes(buffer.getvalue())
    return lambda: open_archive(path.open("rb"), 0, path.stat().st_size, "here")


def test_any_bytes_of_a_tensor_in_any_memory_layout_are_read(tmp_path: Path) -> None:
    whole = random_tensor(torch.int16, (4, 6, 5, 3), 3)
    for tensor in (
        whole,
        whole.permute(2, 0, 3, 1),
        whole[1:, ::2, 1:],
        whole[2:3, :, :, 1],
        whole[0, 0, 0, ::2],
    ):
        archive, expected = archive_of(tensor, tmp_path)(), bits(tensor)
        for begin, end in [
            (0, len(expected)),
            (0, 2),
            (2, len(expected) - 2),
            (len(expected) - 2, len(expected)),
        ]:
            target = torch.zeros(end - begin, dtype=torch.uint8).numpy()
            archive.read_into(begin, target)
            assert target.tobytes() == expected[begin:end]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1], "it is no tensor"),
        (torch.ones(2, dtype=torch.complex64).conj(), "view of a kind"),
        (torch.ones(2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.device("cpu"), "torch.device"),
        (subprocess.Popen, r"names \w+\.Popen"),
    ],
)
def test_an_archive_of_anything_but_a_plain_tensor_is_refused(
    value: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=reason):
        archive_of(value, tmp_path)()


def test_an_archive_of_another_byte_order_is_refused(tmp_path: Path) -> None:
    read = archive_of(torch.ones(8), tmp_path)
    path = tmp_path / "file"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, b"big" if name.endswith("byteorder") else data)
    with pytest.raises(FormatError, match="another byte order"):
        read()


def test_bytes_that_are_no_archive_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    good = archive_of(torch.ones(8), tmp_path)
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            archive = good()
            assert archive.shape != () and archive.data_offset + 32 <= len(data)
        except (FormatError, StorageError):
            pass
    path.write_bytes(data[:-40])
    with pytest.raises(FormatError, match="no archive of a tensor"):
        good()


# -- what is refused, and what an interrupt leaves ------------------------------------------------------


class Runs:
    """A pickle that runs code where it may."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_metadata_that_names_code_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(FormatError, match=r"\.metadata was not read: it names posix\.mkdir"):
        open_source(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"nonsense", pickle.dumps([1]), pickle.dumps({})])
def test_metadata_that_is_none_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(FormatError, match=r"\.metadata is"):
        open_source(tmp_path)


def rewrite(directory: Path, change: Callable[[Any], None]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def leave_directory(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../else.distcp"


def through_extension(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]


def too_many_chunks(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks *= 2


def leave_tensor(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks[0].offsets = torch.Size([1])


def another_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].properties.dtype = torch.int32


def cut_off(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = 1 << 30


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (leave_directory, "no name of a file beside it"),
        (through_extension, "stream.zstd"),
        (too_many_chunks, "two fragments both hold"),
        (leave_tensor, "has a fragment"),
        (another_dtype, "it is float32"),
        (cut_off, "it is cut off"),
    ],
)
def test_a_source_that_cannot_be_used_leaves_nothing(
    change: Callable[[Any], None], reason: str, format: str, tmp_path: Path
) -> None:
    save_with_dcp(tmp_path / "source", {"a": torch.ones(3)})
    rewrite(tmp_path / "source", change)
    with pytest.raises(DataStatesError, match=reason):
        convert_to(tmp_path / "source", tmp_path / "target", format=format)
    assert os.listdir(tmp_path) == ["source"]


def test_a_target_that_exists_is_left_alone(by_dcp: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(StorageError, match="target exists"):
        convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == ["target"] and not os.listdir(tmp_path / "target")


def test_no_room_is_told_before_anything_is_written(
    by_dcp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 20 * MIB})
    monkeypatch.setattr(job.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match=r"has 21\.0 MB free, and 21\.0 MB are needed"):
        convert_to(by_dcp, tmp_path / "target")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_end_in_the_middle_leaves_nothing(
    by_dcp: Path, tmp_path: Path, format: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_MOST_WINDOW_BYTES", MIB)
    count = 0

    def moved(done: int) -> None:
        nonlocal count
        count += 1
        assert count < 8, "nobody stopped"
        if count == 3:
            raise error

    plan = plan_conversion(open_source(by_dcp), tmp_path / "target", format=format, ranks=2)
    with pytest.raises(error):
        convert(plan, LEAST, moved=moved)
    assert not os.listdir(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]


def test_what_an_earlier_try_left_is_replaced(by_dcp: Path, tmp_path: Path) -> None:
    left = tmp_path / ".target.converting"
    left.mkdir()
    (left / "data-00000-0123456789abcdef-1.bin").write_bytes(b"half")
    made = convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == ["target"]
    assert len(data_files(tmp_path / "target")) == len(made.stored_by_rank())


def test_another_conversion_to_the_same_target_is_left_alone(by_dcp: Path, tmp_path: Path) -> None:
    under_way = tmp_path / ".target.converting"
    under_way.mkdir()
    (under_way / "file").write_bytes(b"half")
    descriptor = os.open(under_way, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="another conversion writes into"):
        convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == [".target.converting"]
    assert (under_way / "file").read_bytes() == b"half"
    os.close(descriptor)
    convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_verify_finds_what_was_not_written_as_it_was_read(
    by_dcp: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = job._commit

    def damage(plan: Plan, *rest: Any) -> None:
        commit(plan, *rest)
        path = max(plan.workplace.iterdir(), key=lambda path: path.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(job, "_commit", damage)
    with pytest.raises(CorruptDataError, match="'large'"):
        convert_to(by_dcp, tmp_path / "target", format=format, verify=True)
    assert not os.listdir(tmp_path)


# -- runs -----------------------------------------------------------------------------------------------


def all_of(source: Path, target: Path) -> list[str]:
    found = convert_run(source, target, Wish(means=LEAST), Team(), lambda plan: job.nothing_told)
    return [one.skipped for one in found]


def test_a_run_is_converted_and_goes_on_from_where_it_was(tmp_path: Path) -> None:
    source, target = tmp_path / "run", tmp_path / "made"
    for step in (2, 10):
        save_with_dcp(source / f"iter_{step:07d}", {"a": torch.full((3,), float(step))})
    (source / "iter_0000011").mkdir()  # unfinished
    (source / "latest_checkpointed_iteration.txt").write_text("10")
    first = all_of(source, target)
    assert first[:2] == ["", ""] and "holds no checkpoint of a known format" in first[2]
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "10"
    kept = Checkpoint.open(target / "iter_0000002").manifest
    save_with_dcp(source / "iter_0000011", {"a": torch.ones(3)})
    assert all_of(source, target) == ["it is there already", "it is there already", ""]
    assert Checkpoint.open(target / "iter_0000002").manifest == kept
    assert open_source(target / "iter_0000010").read_tensor("a").tolist() == [10.0] * 3


# -- the command ----------------------------------------------------------------------------------------

WITHOUT_MEGATRON = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from megatron_datastates.cli.main import main
main()
"""


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    everything = [sys.executable, "-c", WITHOUT_MEGATRON, "convert", *map(str, arguments)]
    return subprocess.run(everything, capture_output=True, text=True, check=False)


def test_the_command_needs_no_megatron(by_dcp: Path, tmp_path: Path) -> None:
    done = command(by_dcp, tmp_path / "made", "--verify", "--json", "--ranks", "2", "--memory", "128MiB")
    assert done.returncode == 0, done.stderr
    assert '"files": 2' in done.stdout
    assert contents(open_source(tmp_path / "made")) == contents(open_source(by_dcp))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["{tmp}", "{tmp}/made"], "holds no checkpoint of a known format"),
        (["{tmp}/none", "{tmp}/made"], "is not a directory"),
        (["{source}", "{tmp}"], "exists: give another target"),
        (["{source}", "{tmp}/made", "--to", "zarr"], "format 'zarr' cannot be written"),
        (["{source}", "{tmp}/made", "--memory", "lots"], "--memory 'lots'"),
        (["{source}", "{tmp}/made", "--memory", "1MiB"], "of memory"),
        (["{tmp}", "{tmp}/made", "--all"], "holds no iterations"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    given: list[str], reason: str, by_dcp: Path, tmp_path: Path
) -> None:
    done = command(*(text.format(tmp=tmp_path, source=by_dcp) for text in given))
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr and done.stderr.count("\n") == 1
    assert not os.listdir(tmp_path)


def test_the_command_can_be_interrupted(by_dcp: Path, tmp_path: Path) -> None:
    """While it writes: at 1 KB a second it would take hours."""
    environment = {**os.environ, "MEGATRON_DATASTATES_WRITE_LIMIT": "1KB"}
    everything = [sys.executable, "-c", WITHOUT_MEGATRON, "convert", str(by_dcp), str(tmp_path / "made")]
    running = subprocess.Popen(everything, env=environment, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".made.converting/data-*")):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate()
    assert running.returncode == 130
    assert said.strip() == "datastates: interrupted: what was not whole was removed"
    assert not os.listdir(tmp_path)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
SCRIPT = Path(__file__).parents[2] / "tools" / "convert.py"


def torchrun(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    everything = [*TORCHRUN, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(everything, capture_output=True, text=True, check=False, env=environment)


def test_ranks_of_torchrun_share_the_files(by_dcp: Path, tmp_path: Path) -> None:
    done = torchrun(by_dcp.parent, tmp_path / "made", "--all", "--verify", "--ranks", "3", "--json")
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)
    assert told["files"] == 3 and told["skipped"] == ""
    made = open_source(tmp_path / "made" / by_dcp.name)
    assert contents(made) == contents(open_source(by_dcp))
    assert verify(made.directory).good


def test_what_fails_on_one_rank_of_torchrun_fails_on_all(by_dcp: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(by_dcp, damaged)
    large = max(damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)  # one rank reads it
    large.write_bytes(bytes(large.stat().st_size))
    before = os.listdir(tmp_path)
    done = torchrun(damaged, tmp_path / "made", "--ranks", "2")
    assert done.returncode != 0
    assert "exitcode  : 2" in done.stderr
    assert f"datastates: {large}" in done.stderr
    assert os.listdir(tmp_path) == before
