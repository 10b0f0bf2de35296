"""Ranks of test_device_agreement.py."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from late_device import LateDevice
from saving_rank import join, names_left, report

from megatron_datastates.config import MIB, Options
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publishing import collectives as module
from megatron_datastates.pipeline.publishing import indexes
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider

OPTIONS = Options(staging_memory=8 * MIB, slot_size=MIB)
TENSORS = 20  # of each rank


def enter(transport: str) -> LateDevice | None:
    join()
    return LateDevice() if transport == "device" else None


def tensors_of(rank: int, value: int) -> dict[str, torch.Tensor]:
    return {f"{rank}.{i}": torch.full((1000 + rank,), 100 * value + i) for i in range(TENSORS)}


def start(saver: Saver, directory: Path, value: int) -> Publication:
    return saver.start(directory, TensorProvider(tensors_of(dist.get_rank(), value), Mutability.NOW))


def poll_to_end(publication: Publication) -> int:
    """Polls in step with the other ranks, as trainers do; returns the number of polls."""
    polls = 0
    while publication.outcome is Outcome.PENDING:
        dist.barrier()
        publication.poll()
        polls += 1
    publication.join()
    return polls


def assert_stored(directory: Path, value: int) -> None:
    dist.barrier()  # rank 0 read its outcome in the same poll: the manifest exists
    checkpoint = Checkpoint.open(directory)
    for rank in range(dist.get_world_size()):
        for key, tensor in tensors_of(rank, value).items():
            assert torch.equal(checkpoint.read_tensor(key), tensor), key


def collectives_alone(folder: str) -> None:
    """Starts sums and gathers at once and reads their results in any order, several times."""
    device = enter("device")
    assert device is not None
    collectives = module.Collectives()
    rank, ranks = collectives.rank, collectives.size
    for _ in range(3):
        sums = [collectives.start_sum([rank, i, 1]) for i in range(3)]
        gathers = [collectives.start_gather(bytes([rank, i]) * 50) for i in range(3)]
        for i in (2, 0, 1, 2):
            assert gathers[i].result() == b"".join(bytes([each, i]) * 50 for each in range(ranks))
            assert sums[i].result() == [sum(range(ranks)), ranks * i, ranks]
    assert sorted(device.made) == sorted([12] * 3 + [100 * ranks] * 3), "memory is kept"
    module._ROUND_BYTES = 64 * ranks
    device.made.clear()
    sizes = [0, 1000, *range(100, 100 + ranks)][:ranks]
    arriving = collectives.gather_to_first(bytes([rank + 1]) * sizes[rank], np.array(sizes))
    found = arriving.result()
    assert found == ([bytes([each + 1]) * size for each, size in enumerate(sizes)] if rank == 0 else [])
    assert device.made == [64 * ranks], "rounds share their memory"
    report(folder)


def values_shared(transport: str, folder: str) -> None:
    """Shares values of very different sizes, in rounds that cut them."""
    enter(transport)
    collectives = module.Collectives()
    rank, ranks = collectives.rank, collectives.size
    module._ROUND_BYTES = 64
    for longest in range(ranks):
        value = {"rank": rank, "long": list(range(500))} if rank == longest else None
        expected = [{"rank": n, "long": list(range(500))} if n == longest else None for n in range(ranks)]
        assert collectives.gather_values(value) == expected
    assert collectives.gather_values("x" * (rank * 37)) == ["x" * (n * 37) for n in range(ranks)]
    report(folder)


def saves(root: str, transport: str, folder: str) -> None:
    """Saves one layout three times; the indexes are gathered in several rounds."""
    device = enter(transport)
    ranks = dist.get_world_size()
    module._ROUND_BYTES = 256 * ranks
    saver, counts, polls, made = Saver(OPTIONS, SaveSession()), [], [], []
    for value in range(3):
        saver.session.collectives.calls.clear()
        publication = start(saver, Path(root, str(value)), value)
        polls.append(poll_to_end(publication))
        assert publication.outcome is Outcome.PUBLISHED, publication.error
        assert_stored(Path(root, str(value)), value)
        counts.append(dict(saver.session.collectives.calls))
        made.append(len(device.made) if device is not None else 0)
    index = len(publication.save.plan.layout.index) if publication.save.plan is not None else 0
    saver.close()
    report(folder, counts=counts, polls=polls, made=made, index=index)


def two_saves_at_once(root: str, transport: str, overtake: bool, folder: str) -> None:
    """Polls two saves of one new layout by turns, or publishes the second first (`overtake`)."""
    enter(transport)
    saver = Saver(OPTIONS, SaveSession())
    both = [start(saver, Path(root, str(value)), value) for value in range(2)]
    for publication in both:
        while not publication.save.is_durable:
            time.sleep(0.01)
    dist.barrier()
    if overtake:
        while both[0]._pending_records is None:
            both[0].poll()
        poll_to_end(both[1])
        saver.session.layouts._merged.clear()  # so that the first must gather the layouts itself
    while Outcome.PENDING in [publication.outcome for publication in both]:
        for publication in both:
            publication.poll()
    for value in range(2):
        assert_stored(Path(root, str(value)), value)
    calls = saver.session.collectives.calls
    saver.close()
    report(folder, gathers=calls["gather"], layouts=calls["gather layouts"])


def fail_while_writing(root: str, transport: str, failing_rank: int, folder: str) -> None:
    enter(transport)
    saver = Saver(options_with("write:1:EIO", failing_rank), SaveSession())
    publication = start(saver, Path(root, "bad"), 1)
    polls = poll_to_end(publication)
    calls = dict(saver.session.collectives.calls)
    saver.close()
    report(folder, error=publication.error, left=listed(root), polls=polls, calls=calls)


def options_with(faults: str, rank: int) -> Options:
    return Options(staging_memory=8 * MIB, slot_size=MIB, faults=faults if dist.get_rank() == rank else "")


def listed(root: str) -> list[str]:
    return names_left(Path(root, "bad"))


def fail_as_records_go_out(root: str, transport: str, failing_rank: int, later: bool, folder: str) -> None:
    """Fails on one rank after it sent its record: before sending flags in that poll, or (`later`) after."""
    enter(transport)
    saver = Saver(options_with("write manifest:1:stall=300", 0), SaveSession())
    publication = start(saver, Path(root, "bad"), 1)
    collectives = saver.session.collectives

    def fail() -> None:
        if collectives.rank == failing_rank:
            publication.save.fail(OSError("just now"))

    gather: Callable[[bytes], Any] = collectives.start_gather

    def gather_and_fail(record: bytes) -> Any:
        pending = gather(record)
        if not later:
            fail()
        return pending

    collectives.start_gather = gather_and_fail  # type: ignore[method-assign]
    while not publication._publishing:
        publication.poll()
        time.sleep(0.002)
    if later:
        fail()
    poll_to_end(publication)
    if later:
        assert_stored(Path(root, "bad"), 1)
    began = publication.publisher._thread is not None
    saver.close()
    report(folder, error=publication.error, left=listed(root), began=began)


def end_while_indexes_are_under_way(root: str, folder: str) -> None:
    """Ends the program while the device hangs."""
    device = enter("device")
    assert device is not None
    indexes.PATIENCE_SECONDS = 0.2
    saver = Saver(OPTIONS, SaveSession())
    publication = start(saver, Path(root, "bad"), 1)
    while not publication.records:
        if publication._pending_records is not None:
            assert publication._polls._pending_sum is not None
            publication._polls._pending_sum.result()  # all that was enqueued before is done
            device.hangs = True
        dist.barrier()
        publication.poll()
    saver.close()
    report(folder, left=listed(root), failure=publication.save.failure)
