"""Checkpoints in an object store: brought there by drains, read from there, and what happens where it fails.

The store is moto's S3 behind a real HTTP server, reached through NVIDIA's multi-storage client.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("multistorageclient")
pytest.importorskip("moto")

from botocore.retries.standard import ExponentialBackoff
from multistorageclient import StorageClient

import megatron_datastates as ds
from megatron_datastates import stores
from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import (
    CorruptDataError,
    NotACheckpointError,
    OptionError,
    SaveFailedError,
    StorageError,
)
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore.errors import MegatronLoadFailedError
from megatron_datastates.mcore.load import opening
from megatron_datastates.mcore.load.agreement import is_caused_by_damage
from megatron_datastates.mcore.training.absent import require_there
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.slices import plan_into
from megatron_datastates.pipeline.near import drain, places, tier
from megatron_datastates.pipeline.near.recovery import recover_newest
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.runs.jobs import JOBS_NAME, jobs_in
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.support.object_store import (
    BUCKET,
    EXPIRED,
    RUN,
    UNAVAILABLE,
    ObjectStore,
    configure,
    s3,
    served,
    unfinished,
)
from tests.support.waiting import eventually
from tests.unit.command import run
from tests.unit.states import OPTIONS, State, bits, data_files, random_tensor
from tests.unit.test_near_replicas import Cluster
from tests.unit.test_near_tier import Nodes


def long(*values: object) -> list[Any]:
    """Returns cases that `make test` leaves out."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


ROOT = Path(__file__).parents[2]  # of the sources
ELEMENTS = 5_000_000  # 20 MB a rank: three parts


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    store, address = served()
    configure(tmp_path / "msc.json", address)
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.01)
    monkeypatch.chdir(tmp_path)
    store.requests.clear()
    store.log.clear()
    store.sent_bytes = 0
    yield store
    store.heal()
    while made:  # also of a test that failed: its drain would go on
        abandon(made.pop())
    client = s3(address)
    for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=found["Key"])
    for upload in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
        client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
    assert not list(tmp_path.glob("msc:*")), "nothing takes the path for a file's"


made: list[FarNodes] = []  # in a test


class FarNodes(Nodes):
    """Two nodes whose far side is the object store."""

    def __init__(self, root: Path, *own: dict[str, object], **changes: object) -> None:
        super().__init__(root, *own, **changes)
        self.run = stores.path_of(RUN)
        made.append(self)


def save(nodes: Nodes, iteration: int) -> Outcome:
    return begun(nodes, iteration).outcome


def begun(nodes: Nodes, iteration: int) -> Publication:
    states = [
        State(
            {f"w{rank}": random_tensor(torch.float32, (ELEMENTS,), iteration + rank)}, {f"o{rank}": iteration}
        )
        for rank in (0, 1)
    ]
    return nodes.ranks.save(nodes.directory(iteration), states)


def check(nodes: Nodes, iteration: int) -> None:
    assert verify(nodes.directory(iteration)).faults == []
    checkpoint = Checkpoint.open(nodes.directory(iteration), OPTIONS)
    for rank in (0, 1):
        expected = random_tensor(torch.float32, (ELEMENTS,), iteration + rank)
        assert bits(checkpoint.read_tensor(f"w{rank}")) == bits(expected)
        assert checkpoint.read_object(f"o{rank}") == iteration


def test_a_checkpoint_becomes_far_and_is_read_from_there(store: ObjectStore, tmp_path: Path) -> None:
    nodes = FarNodes(tmp_path)
    assert save(nodes, 1) is Outcome.PUBLISHED
    assert nodes.near(0, 1).is_dir() and data_files(nodes.near(0, 1))
    nodes.close()
    assert store.requests["POST uploads"] == 2 and store.requests["PUT part"] == 6
    assert not store.requests["GET list"], "nothing is listed to publish"
    check(nodes, 1)
    assert len(nodes.ranks.far) == 1


def test_only_what_is_needed_is_read(store: ObjectStore, tmp_path: Path) -> None:
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    nodes.close()
    checkpoint = Checkpoint.open(nodes.directory(1), OPTIONS)
    store.sent_bytes = 0
    store.requests.clear()
    part = checkpoint.read_tensor("w1", [2_000_000], [1000])
    assert bits(part) == bits(random_tensor(torch.float32, (ELEMENTS,), 2)[2_000_000:2_001_000])
    assert store.sent_bytes <= (1 << 20) + (256 << 10) + (64 << 10), (
        "a block, a footer and an index's section"
    )
    assert not store.requests["GET list"]


def test_what_several_ranks_of_a_node_read_is_fetched_with_what_lies_beside_it(
    store: ObjectStore, tmp_path: Path
) -> None:
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    nodes.close()
    checkpoint = Checkpoint.open(nodes.directory(1), OPTIONS)
    checkpoint.require([0, 1])
    store.requests.clear()
    halves = [torch.zeros(ELEMENTS // 2) for _ in range(2)]
    reads = [
        read
        for n, half in enumerate(halves)
        for read in plan_into(checkpoint, "w1", (n * (ELEMENTS // 2),), half.shape, half, n == 1)
    ]
    before = checkpoint.costs.bytes_read
    checkpoint.read(reads)
    assert checkpoint.costs.bytes_read - before == checkpoint.footer(1).data_bytes, (
        "an object has no page cache"
    )
    assert bits(torch.cat(halves)) == bits(random_tensor(torch.float32, (ELEMENTS,), 2))


def test_another_save_in_a_directory_of_a_store_is_what_megatrons_next_load_reads(
    store: ObjectStore, tmp_path: Path
) -> None:
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    nodes.close()
    directory = nodes.directory(1)
    first = opening.open_checkpoint(directory).manifest
    other = msgspec.structs.replace(first, created="2001-01-01T00:00:00+00:00")
    assert len(other.encode()) == len(first.encode())
    write_whole(directory / MANIFEST_NAME, other.encode(), Faults(""), other.save_id)
    assert opening.open_checkpoint(directory).manifest.created == other.created


def abandon(nodes: FarNodes) -> None:
    """Closes as a program does that ends with an error, and waits for what is under way."""
    for saver in nodes.ranks.savers:
        if saver.near is not None:
            saver.near.drain.close(abandon=True)
            thread = saver.near.drain._thread
            assert thread is None or thread.join(60)


# -- failures ---------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (0.05,))


@pytest.mark.parametrize("kind", ["PUT part", *long("POST uploads", "POST upload ", "HEAD", "PUT /")])
def test_a_request_that_fails_once_is_sent_again(
    kind: str, store: ObjectStore, tmp_path: Path, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    store.fail(kind, UNAVAILABLE, 1)
    nodes = FarNodes(tmp_path)
    assert save(nodes, 1) is Outcome.PUBLISHED
    nodes.close()
    check(nodes, 1)


class PanicException(BaseException):
    """As pyo3 raises it for a panic of a client's Rust."""


@pytest.mark.parametrize("name", ["info", "write"])
def test_a_panic_of_the_client_ends_no_drain(
    name: str, store: ObjectStore, tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, left = getattr(StorageClient, name), [1]

    def panics(*args: Any, **kwargs: Any) -> Any:
        if left and threading.current_thread() is not threading.main_thread():
            left.pop()
            raise PanicException("in Rust")
        return original(*args, **kwargs)

    monkeypatch.setattr(StorageClient, name, panics)
    nodes = FarNodes(tmp_path)
    assert save(nodes, 1) is Outcome.PUBLISHED
    nodes.close()
    assert not left
    check(nodes, 1)


@pytest.mark.parametrize("answer", [EXPIRED, *long(UNAVAILABLE)])
def test_an_outage_is_waited_for_and_reported(
    answer: tuple[str, str],
    store: ObjectStore,
    tmp_path: Path,
    impatient: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.fail("PUT|POST", answer)
    nodes = FarNodes(tmp_path)
    assert save(nodes, 1) is Outcome.PUBLISHED
    eventually(lambda: "it is tried again" in caplog.text)
    assert "was not copied from" in caplog.text and RUN in caplog.text
    store.heal()
    nodes.close()
    check(nodes, 1)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.long)])
def test_with_copies_a_lost_node_costs_nothing_that_was_not_in_the_store_yet(
    lost: int, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    nodes = FarNodes(tmp_path, near_replicas=1)
    assert save(nodes, 1) is Outcome.PUBLISHED
    eventually(lambda: nodes.is_far(1))
    store.fail("PUT|POST", UNAVAILABLE)
    assert save(nodes, 2) is Outcome.PUBLISHED, "near; the store is away"
    abandon(nodes)
    store.heal()
    assert not nodes.is_far(2)
    shutil.rmtree(nodes.roots[lost])

    found, said = Cluster(monkeypatch, nodes.roots).recover(nodes.run)

    assert found == 2 and "1 of them taken from copies on other nodes" in said
    check(nodes, 2)
    assert stores.read_whole(nodes.run / TRACKER_NAME) == b"2"
    resumed = FarNodes(tmp_path, near_replicas=1)  # on the replaced node and the other one
    assert save(resumed, 3) is Outcome.PUBLISHED
    assert [len(data_files(resumed.near(node, 3))) for node in (0, 1)] == [2, 2]
    resumed.close()
    check(resumed, 3)


@pytest.mark.long
def test_what_an_earlier_job_left_near_keeps_no_save_from_the_store(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = FarNodes(tmp_path, faults="drain write:0:EIO")
    for iteration in (1, 2):
        save(before, iteration)
    abandon(before)
    assert Cluster(monkeypatch, before.roots).recover(before.run)[0] == 2
    nodes = FarNodes(tmp_path)
    for saver in nodes.ranks.savers:
        saver.session._run_id = 5
    room = places.SPARE_BYTES + 10 * ELEMENTS  # two and a half saves of a rank

    def free_bytes(root: Path) -> int:
        return room - sum(path.stat().st_size for path in root.rglob("*") if path.is_file())

    monkeypatch.setattr(tier, "free_bytes", free_bytes)
    assert free_bytes(nodes.roots[0]) < 4 * ELEMENTS + places.SPARE_BYTES
    assert save(nodes, 3) is Outcome.PUBLISHED
    nodes.close()
    check(nodes, 3)


def test_a_save_for_which_a_node_has_no_room_fails_and_the_next_one_tries_again(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = FarNodes(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(tier, "free_bytes", lambda root: places.SPARE_BYTES)
        failed = begun(nodes, 1)
    assert failed.outcome is Outcome.FAILED
    assert "saves reach an object store only through it: 64 MiB are free" in (failed.error or "")
    assert save(nodes, 2) is Outcome.PUBLISHED
    nodes.close()
    check(nodes, 2)


def test_an_outage_while_the_manifest_is_written(
    store: ObjectStore,
    tmp_path: Path,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(drain, "_LOOK_SECONDS_OBJECTS", 0.05)
    store.fail(f"PUT .*{MANIFEST_NAME}", UNAVAILABLE)
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    eventually(lambda: "is not published in" in caplog.text)
    assert not (nodes.directory(1) / MANIFEST_NAME).is_file()
    store.heal()
    nodes.close()
    check(nodes, 1)


def test_the_manifest_is_the_last_object(store: ObjectStore, tmp_path: Path) -> None:
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    nodes.close()
    written = [path for kind, path in store.log if kind in ("PUT", "POST upload")]
    assert written[-1].endswith(f"/{MANIFEST_NAME}")
    names = {path.rpartition("/")[2] for path in written}
    assert names == {JOBS_NAME, *stores.names_below(nodes.directory(1))}
    assert [job.origin for job in jobs_in(nodes.run)] == [0]


def test_damage_in_the_near_tier_is_not_uploaded(
    store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.fail("POST uploads", 1.5, 2)  # seconds: time to do harm
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    (path,) = data_files(nodes.near(1, 1))
    with path.open("r+b") as file:
        file.seek(12 << 20)
        file.write(b"damage")
    eventually(lambda: "is corrupt: the checksum of block 12 (1 MiB) differs" in caplog.text)
    abandon(nodes)
    assert not (nodes.directory(1) / path.name).is_file()
    assert not (nodes.directory(1) / MANIFEST_NAME).is_file()


def test_damage_in_the_store_is_found(store: ObjectStore, tmp_path: Path) -> None:
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    nodes.close()
    checkpoint = Checkpoint.open(nodes.directory(1), OPTIONS)
    path = nodes.directory(1) / checkpoint.manifest.files[1].name
    data = bytearray(stores.read_whole(path))
    data[5 << 20] ^= 1
    stores.write(path, bytes(data))
    (fault,) = verify(nodes.directory(1)).faults
    assert fault == (
        f"{path}, which rank 1 wrote, is corrupt: the 1 MiB block at byte offset {5 << 20} has a wrong "
        "checksum. It holds data of 'w1'."
    )
    with pytest.raises(CorruptDataError, match="w1"):
        checkpoint.read_tensor("w1")
    assert bits(checkpoint.read_tensor("w1", [0], [1000])) == bits(
        random_tensor(torch.float32, (ELEMENTS,), 2)[:1000]
    )
    stores.write(path, bytes(data[:-4096]))
    with pytest.raises(StorageError, match="it was truncated or replaced"):
        Checkpoint.open(nodes.directory(1), OPTIONS).read_tensor("w1")
    stores.remove(path)
    with pytest.raises(StorageError, match=f"{path}.*there is no such object"):
        Checkpoint.open(nodes.directory(1), OPTIONS).read_tensor("w1")


def test_reads_outlive_a_failure_and_slowness_and_name_what_they_cannot_read(
    store: ObjectStore, tmp_path: Path
) -> None:
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    nodes.close()
    expected = bits(random_tensor(torch.float32, (ELEMENTS,), 1))
    store.fail("GET .*data-00000", UNAVAILABLE, 2)
    store.fail("GET", 0.2, 3)
    assert bits(Checkpoint.open(nodes.directory(1), OPTIONS).read_tensor("w0")) == expected
    checkpoint = Checkpoint.open(nodes.directory(1), OPTIONS)
    checkpoint.read_tensor("w0", [0], [1])
    store.fail("GET", EXPIRED)
    with pytest.raises(
        StorageError, match=rf"{checkpoint.file_path(0)} cannot be read: the object store refuses"
    ):
        checkpoint.read_tensor("w0")
    with pytest.raises(StorageError, match="the object store refuses it"):
        Checkpoint.open(nodes.directory(1), OPTIONS)


KILLED = """
import sys
from pathlib import Path
from tests.unit.test_object_store import FarNodes, save
nodes = FarNodes(Path(sys.argv[1]))
save(nodes, 1)
nodes.close()
nodes = FarNodes(Path(sys.argv[1]), {{"faults": "{fault}"}}, {{}})
save(nodes, 2)
nodes.close()
"""


@pytest.mark.parametrize(
    "fault", ["drain write:2:kill", *long("write index:3:kill", "write manifest:2:kill")]
)
def test_a_killed_drain_leaves_no_checkpoint_and_the_next_job_brings_it_home(
    fault: str, store: ObjectStore, tmp_path: Path
) -> None:
    job = subprocess.run(
        [sys.executable, "-c", KILLED.format(fault=fault), str(tmp_path)], cwd=Path(__file__).parents[2]
    )
    assert job.returncode == -signal.SIGKILL
    nodes = FarNodes(tmp_path)
    check(nodes, 1)
    assert not (nodes.directory(2) / MANIFEST_NAME).is_file()
    with pytest.raises(NotACheckpointError, match="there is no object"):
        Checkpoint.open(nodes.directory(2), OPTIONS)
    left = unfinished()
    assert left or not fault.startswith("drain write")  # else an upload may be under way, or not
    assert all(name.startswith("run/iter_0000002/data-") for name in left)
    code, out, err = run("prune", RUN, "--keep-last", "1", "--min-age", "0", "--yes")
    assert code == 0 and (not left or f"{len(left)} left-over file" in out), err
    assert unfinished() == []
    check(nodes, 1)

    for path in nodes.near(1, 2).glob("data-*"):  # in these tests one process looks for all nodes
        shutil.copy(path, nodes.near(0, 2))
    said: list[str] = []
    options = dataclasses.replace(OPTIONS, near=str(nodes.roots[0]))
    assert recover_newest(nodes.run, options, said.append) == 2
    assert f"iteration 2 is newer than what is in {RUN} (" in said[0]
    check(nodes, 2)
    assert recover_newest(nodes.run, options, said.append) is None


def test_drains_end_before_the_interpreter_does(store: ObjectStore, tmp_path: Path) -> None:
    nodes = FarNodes(tmp_path)
    for iteration in (1, 2):
        save(nodes, iteration)
        for saver in nodes.ranks.savers:
            saver.near.drain.finish_objects()
        check(nodes, iteration)
    nodes.close()


def test_the_end_of_a_job_waits_for_parts_that_are_slow(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_STALLED_SECONDS", 0.1)
    monkeypatch.setattr(drain, "_LOOK_SECONDS", 0.05)
    store.fail("PUT part", 1.0)  # seconds; the client has read all parts at once
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    nodes.close()
    check(nodes, 1)


def test_what_the_end_of_training_has_given_up_goes_to_the_store_with_the_next_training(
    store: ObjectStore, tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_STALLED_SECONDS_OBJECTS", 0.5)
    monkeypatch.setattr(drain, "_LOOK_SECONDS", 0.05)
    store.fail("PUT|POST", EXPIRED)
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    ends = [threading.Thread(target=saver.near.drain.finish_objects) for saver in nodes.ranks.savers]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    assert all(saver.near.drain._left or saver.near.drain._to_copy for saver in nodes.ranks.savers)
    monkeypatch.setattr(drain, "_STALLED_SECONDS_OBJECTS", 60.0)
    store.heal()
    save(nodes, 2)
    nodes.close()
    check(nodes, 2)
    check(nodes, 1)


@pytest.mark.parametrize("is_done", [False, True])
def test_the_last_save_is_drained_after_an_earlier_wait_in_vain(
    is_done: bool, store: ObjectStore, tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_STALLED_SECONDS_OBJECTS", 0.3)
    monkeypatch.setattr(drain, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(drain, "_LOOK_SECONDS_OBJECTS", 0.05)
    nodes = FarNodes(tmp_path, drain_every=2, near_keep=2)
    drains = [saver.near.drain for saver in nodes.ranks.savers]
    save(nodes, 1)
    store.fail("(PUT|POST) .*-00001", EXPIRED)  # of the other node
    save(nodes, 2)  # of these two, only this one is drained before the end
    eventually(lambda: drains[0]._queue.saves)
    drains[0].finish_objects()
    assert drains[0]._queue.saves, "it has waited in vain"
    monkeypatch.setattr(drain, "_STALLED_SECONDS_OBJECTS", 60.0)
    if is_done:  # with what it was waited for, before the next training saves
        store.heal()
        eventually(lambda: not drains[0]._queue.saves)
    save(nodes, 3)  # it stays near until the end
    store.heal()
    eventually(lambda: not drains[0]._queue.saves)
    nodes.close()
    check(nodes, 2)
    check(nodes, 3)


@pytest.mark.long
def test_a_job_that_has_waited_in_vain_waits_once_more_only_for_a_further_save(
    store: ObjectStore, tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_STALLED_SECONDS_OBJECTS", 1.5)
    monkeypatch.setattr(drain, "_LOOK_SECONDS", 0.05)
    store.fail("(PUT|POST) .*-00001", EXPIRED)  # of the other node
    nodes = FarNodes(tmp_path)
    save(nodes, 1)
    first = nodes.ranks.savers[0].near.drain
    eventually(lambda: first._queue.saves)
    looks, join = [], first._thread.join
    monkeypatch.setattr(first._thread, "join", lambda timeout: looks.append(timeout) or join(timeout))

    def looks_of(end: Any) -> int:
        looks.clear()
        end()
        return len([timeout for timeout in looks if timeout])

    assert looks_of(first.finish_objects) > 1
    assert looks_of(lambda: first.close(abandon=False)) == 1
    save(nodes, 2)
    assert looks_of(lambda: first.close(abandon=False)) > 1
    assert looks_of(lambda: first.close(abandon=False)) == 1


def test_megatrons_loop_ends_drains_before_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_datastates.mcore.training import loop

    calls: list[str] = []
    monkeypatch.setattr(
        "megatron_datastates.pipeline.saver_pool.finish_objects", lambda: calls.append("drained")
    )
    monkeypatch.setattr(loop, "_require_restored_data", lambda iterator: None)
    last_call = functools.partial(loop.wrap_last_call, lambda *args, **kwargs: calls.append("finalized"))

    def train(train_data_iterator: object) -> None:
        last_call(blocking=True, terminate=True)  # as it does: a last save may follow in `pretrain`
        sys.exit(train_data_iterator)

    with pytest.raises(SystemExit):
        loop.wrap_train(train, 0)
    assert calls == ["finalized", "drained"]
    last_call(blocking=False)
    assert calls[2:] == ["finalized"]
    last_call(blocking=True, terminate=True)
    assert calls[3:] == ["finalized", "drained"]


def test_retention_asks_no_store_for_its_tracker(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain writes it, and an outage would hold the trainer."""
    from megatron_datastates.mcore.training import retention

    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    args = argparse.Namespace(save=RUN, rank=0, save_retain_interval=2)
    monkeypatch.setattr(checkpointing, "get_args", lambda: args)
    with retention.saving(4):
        assert not store.log


UPLOADED_LATE = """
import atexit, io
from megatron_datastates import stores
target = stores.path_of("{target}")
atexit.register(lambda: stores.upload(target, io.BytesIO(bytes(20 << 20))))
"""


def test_an_interpreter_that_is_ending_uploads_part_by_part(store: ObjectStore, tmp_path: Path) -> None:
    target = stores.path_of(RUN) / "late"
    code = UPLOADED_LATE.format(target=target)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert stores.size_of_object(target) == 20 << 20 and store.requests["PUT part"] == 3


# -- what is refused --------------------------------------------------------------------------------------


def test_a_save_without_a_near_tier_is_refused(store: ObjectStore) -> None:
    with pytest.raises(
        SaveFailedError, match="is in an object store, which saves reach only through a near tier"
    ):
        ds.save({"w": torch.ones(4)}, f"{RUN}/iter_0000001")


def test_a_profile_that_is_not_configured_is_named(store: ObjectStore) -> None:
    with pytest.raises(OptionError, match=r'msc://nobody/run.*Profile "nobody" not found'):
        ds.open("msc://nobody/run/iter_0000001")
    with pytest.raises(OptionError, match="expected msc://PROFILE/PATH"):
        ds.open("msc://")


def test_what_a_path_of_an_object_does_not_do_never_touches_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "msc:/store").mkdir(parents=True)  # what a call that takes the path for a file's would find
    path: Any = stores.path_of(RUN)
    calls: list[tuple[str, tuple[object, ...]]] = [
        *((name, ()) for name in ("touch", "rmdir", "walk", "read_text", "readlink", "owner", "group")),
        *(
            ("chmod", (0o600,)),
            ("symlink_to", ("other",)),
            ("hardlink_to", ("other",)),
            ("rename", ("other",)),
        ),
        *(("replace", ("other",)), ("glob", ("*",)), ("rglob", ("*",)), ("write_text", ("",))),
        *(("write_bytes", (b"",)), ("open", ())),
    ]
    for name, arguments in calls:
        with pytest.raises(OSError, match="is not done in object stores"):
            getattr(path, name)(*arguments)
    assert list((tmp_path / "msc:").rglob("*")) == [tmp_path / "msc:/store"]


def test_a_checkpoint_that_the_tracker_names_and_that_is_gone_is_damage(store: ObjectStore) -> None:
    """So that a load may fall back to an older one. A store that refuses to list has not lost it."""
    run = stores.path_of(RUN)
    stores.write(run / "iter_0000002" / "metadata.json", b"{}")
    expected = r"latest_checkpointed_iteration.txt names .* expected iter_0000004 .* the iterations 2\."
    with pytest.raises(MegatronLoadFailedError, match=expected) as error:
        require_there(run / "iter_0000004", None)
    assert is_caused_by_damage(error.value)
    require_there(run / "iter_0000002", None)
    store.fail("list", EXPIRED)
    require_there(run / "iter_0000004", None)


def test_what_is_named_as_the_folder_that_it_is_in_is_listed(store: ObjectStore) -> None:
    folder = stores.path_of("msc://store/release")
    stores.write(folder / "release" / MANIFEST_NAME, b"")
    assert stores.names_below(folder) == stores.folders_below(folder) == ["release"]


def test_a_configuration_that_the_client_cannot_use_is_named_without_its_secrets(
    store: ObjectStore, tmp_path: Path
) -> None:
    config = tmp_path / "msc.json"
    whole = config.read_text()
    for kind, value, said in [
        (
            "credentials_provider",
            {"type": "S3Credentials", "options": [{"secret_key": "hidden"}]},
            r"value at \$",
        ),
        ("retry", "three", "AttributeError: |value at .*retry"),
    ]:
        settings = json.loads(whole)
        settings["profiles"][kind] = settings["profiles"]["store"] | {kind: value}
        config.write_text(json.dumps(settings))
        with pytest.raises(OptionError, match=f"msc://{kind}/run: .*{config}: .*({said})") as refused:
            stores.require_answer(stores.path_of(f"msc://{kind}/run"))
        assert "hidden" not in "".join(traceback.format_exception(refused.value))
    settings = json.loads(whole)
    for kind, endpoint in [("no_url", "user:hidden@x"), ("closed", "http://user:hidden@127.0.0.1:1")]:
        profile = copy.deepcopy(settings["profiles"]["store"]) | {"retry": {"attempts": 1}}
        profile["storage_provider"]["options"]["endpoint_url"] = endpoint
        config.write_text(json.dumps({"profiles": {kind: profile}}))
        with pytest.raises((OptionError, OSError), match=r"\*\*\*@") as refused_url:
            stores.require_answer(stores.path_of(f"msc://{kind}/run"))
        assert "hidden" not in str(refused_url.value)


def test_a_store_that_cannot_be_used_is_refused_when_training_starts(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, its drain would go on trying, and say so in the log only."""
    from megatron_datastates.mcore.training import checks

    monkeypatch.setattr(checks, "msc_is_enabled", lambda: True)
    config = tmp_path / "msc.json"
    settings = json.loads(config.read_text())
    settings["profiles"]["elsewhere"] = copy.deepcopy(settings["profiles"]["store"])
    settings["profiles"]["elsewhere"]["storage_provider"]["options"]["base_path"] = "no-such-bucket"
    config.write_text(json.dumps(settings))
    checks.check_object_stores(argparse.Namespace(save=RUN))
    for url, said in [
        ("msc://elsewhere/run", "--save msc://elsewhere/run cannot be listed: NoSuchBucket"),
        ("msc://nobody/run", 'Profile "nobody" not found'),
        ("s3://bucket/run", "--save s3://bucket/run: expected a directory, or msc://PROFILE/PATH"),
    ]:
        with pytest.raises((OptionError, StorageError), match=said):
            checks.check_object_stores(argparse.Namespace(save=url))
    store.fail("GET list", EXPIRED)
    with pytest.raises(StorageError, match=f"--load {RUN} cannot be listed: the object store refuses it"):
        checks.check_object_stores(argparse.Namespace(save="run", load=RUN))


def test_a_release_that_does_not_use_the_client_refuses_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_datastates.mcore.training import checks

    monkeypatch.setattr(checks, "msc_is_enabled", lambda: False)
    for args in ({"save": RUN, "enable_msc": False}, {"load": RUN}):
        with pytest.raises(OptionError, match=r"give --enable-msc, too .*leave out --disable-msc"):
            checks.check_object_stores(argparse.Namespace(**args))
    checks.check_object_stores(argparse.Namespace(save="run", load="run"))
