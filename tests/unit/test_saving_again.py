"""Saves after the first: cached layouts, changed state, and one directory twice."""

from __future__ import annotations

import gc
import json
import signal
import threading
import weakref

import numpy as np
import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.saving.held import trainer_held
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.streams import StreamSource
from tests.unit.states import (
    OPTIONS,
    SMALL,
    Chained,
    State,
    Yields,
    bits,
    data_files,
    new_saver,
    random_tensor,
    save,
)


def fresh(seed: int, rows: int = 300) -> dict[str, torch.Tensor]:
    tensors = {f"w{n}": random_tensor(torch.float32, (rows, 100), 10 * seed + n) for n in range(4)}
    return tensors | {"strided": random_tensor(torch.float32, (rows, 1000), 10 * seed + 5)[:, 200:800]}


def stored(directory) -> dict[str, bytes]:
    checkpoint = ds.open(directory, **SMALL)
    return {key: bits(checkpoint.read_tensor(key)) for key in checkpoint.index.tensors}


def wanted(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {key: bits(tensor) for key, tensor in tensors.items()}


@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
def test_changed_tensors_are_saved_as_they_are_now(saver, tmp_path, mutability):
    tensors = fresh(0)
    for number in range(3):
        save(saver, tmp_path / str(number), tensors, mutability=mutability)
        assert stored(tmp_path / str(number)) == wanted(tensors)
        for tensor in tensors.values():
            tensor.add_(1)


@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
def test_tensors_in_other_memory_than_before_are_saved_from_there(saver, tmp_path, mutability):
    earlier = []  # kept, so that no allocation is reused: old addresses would read old values
    for number in range(3):
        tensors = fresh(number)
        earlier.append(tensors)
        save(saver, tmp_path / str(number), tensors, mutability=mutability)
        assert stored(tmp_path / str(number)) == wanted(tensors)


def test_tensors_that_swapped_their_memory_are_saved_as_they_are_now(saver, tmp_path):
    tensors = {"a": torch.zeros(5000), "b": torch.ones(5000)}
    save(saver, tmp_path / "0", tensors)
    tensors["a"].data, tensors["b"].data = tensors["b"].data, tensors["a"].data
    save(saver, tmp_path / "1", tensors)
    assert stored(tmp_path / "1") == {"a": bits(torch.ones(5000)), "b": bits(torch.zeros(5000))}


def test_freed_and_reused_memory_is_no_danger(saver, tmp_path):
    for number in range(5):
        tensors = fresh(number)
        save(saver, tmp_path / str(number), tensors, mutability=Mutability.NEVER)
        assert stored(tmp_path / str(number)) == wanted(tensors)
        del tensors


def test_sources_are_kept_until_they_are_copied_and_no_longer(saver, tmp_path):
    array = np.arange(3_000_000)
    expected, alive = array.tobytes(), weakref.ref(array)
    state = State({"w": torch.from_numpy(array)}, mutability=Mutability.NEVER)
    publication = saver.start(tmp_path / "c", state)
    del array, state
    publication.wait()
    assert stored(tmp_path / "c") == {"w": expected}
    assert alive() is None


def test_what_was_copied_before_the_save_returned_is_not_kept(tmp_path):
    """Fresh tensors of a state dict may be as large as the model. Here the copy of another one takes long."""
    saver = new_saver(copy_limit=2 << 20)
    arrays = [np.arange(100_000), np.arange(400_000)]
    expected = dict(zip(("fresh", "lazy"), [array.tobytes() for array in arrays], strict=True))
    is_fresh_kept, is_lazy_kept = (weakref.ref(array) for array in arrays)
    lazy, fresh_one = torch.from_numpy(arrays.pop()), torch.from_numpy(arrays.pop())
    state = Chained(State({"fresh": fresh_one}), State({"lazy": lazy}, mutability=Mutability.NEVER))
    publication = saver.start(tmp_path / "c", state)
    del state, lazy, fresh_one
    assert is_fresh_kept() is None and is_lazy_kept() is not None
    assert publication.wait() is Outcome.PUBLISHED
    assert stored(tmp_path / "c") == expected
    assert is_lazy_kept() is None


@pytest.mark.parametrize("tensors", [Mutability.NOW, Mutability.AT_FENCE], ids=lambda m: m.name)
def test_a_fence_waits_for_streams_although_a_poll_saw_that_tensors_were_copied(saver, tmp_path, tensors):
    begun, goes_on, content = threading.Event(), threading.Event(), bytearray(b"before")

    def writer(write):
        begun.set()
        goes_on.wait(60.0)
        write(content)

    written = Yields(StreamSource("s", writer, Mutability.AT_FENCE))
    state = Chained(State({"w": torch.ones(9)}, mutability=tensors), written)
    publication = saver.start(tmp_path / "c", state)
    assert begun.wait(60.0)
    while not all(file.sources_copied() for file in publication.save._files):
        publication.poll()
    publication.poll()
    threading.Timer(0.2, goes_on.set).start()
    FENCE.wait("the step")
    content[:] = b"after!"
    assert publication.wait() is Outcome.PUBLISHED
    stream = Checkpoint.open(tmp_path / "c", OPTIONS).open_stream("s")
    assert b"".join(map(bytes, stream)) == b"before"


def test_an_interrupted_fence_holds_the_next_step_too(tmp_path):
    """A notebook goes on after Ctrl-C. Here one row changes, which the tripwire need not see."""
    # The fence begins the copies, which take a second.
    saver = new_saver(copy_limit=4 << 20, tripwire=False, lazy_delay=3600.0)
    tensor = torch.zeros(1024, 1024)
    publication = saver.start(tmp_path / "c", State({"w": tensor}, mutability=Mutability.AT_FENCE))

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            FENCE.wait("the first step")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    FENCE.wait("the second step")
    tensor.fill_(1)
    assert publication.wait() is Outcome.PUBLISHED
    assert stored(tmp_path / "c") == {"w": bits(torch.zeros(1024, 1024))}


def test_an_interrupt_while_all_is_copied_ends_the_save(tmp_path, monkeypatch):
    saver = new_saver()

    def interrupted(rank_save):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RankSave, "await_copies", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.start(tmp_path / "c", State(fresh(1), mutability=Mutability.AT_FENCE), await_copies=True)
    (publication,) = saver._unfinished
    assert publication.join(60.0)
    assert not list(tmp_path.glob("c/*"))
    assert save(saver, tmp_path / "d", fresh(2)).outcome is Outcome.PUBLISHED
    assert publication.outcome is Outcome.FAILED, "polls of the later save have ended it"
    saver.close()


def test_saves_of_a_world_that_is_gone_are_forgotten(tmp_path):
    saver = new_saver()
    for number in range(3):
        saver.start(tmp_path / str(number), State(fresh(number)))
        saver.session.begin_world(Collectives())  # as after torch.distributed was initialized anew
    saver._abandon_old_world()
    assert all(one.join(60.0) for one in saver._unfinished)
    saver._abandon_old_world()
    assert saver._unfinished == []
    saver.close()


def test_saves_that_are_over_are_freed_without_the_garbage_collector(tmp_path):
    """Megatron's --manual-gc switches it off."""
    saver = new_saver(report_file=str(tmp_path / "reports.jsonl"))
    gc.collect()
    gc.disable()
    try:
        left = []
        for number in range(3):
            state = State({"w": torch.ones(1000)}, {"o": b"x" * 100_000})
            with trainer_held("start"):
                publication = saver.start(tmp_path / str(number), state)
            publication.wait()
            left += [weakref.ref(part) for part in (publication, publication.save, publication.save._save)]
            publication.save.join()
        del publication, state
        saver.start(tmp_path / "next", State({"w": torch.ones(1)})).wait()
        assert [part() for part in left] == [None] * 9
    finally:
        gc.enable()


def test_equal_structures_share_an_index(saver, tmp_path):
    names = set()
    for number in range(3):
        save(saver, tmp_path / str(number), fresh(number))
        names.add(ds.open(tmp_path / str(number), **SMALL).manifest.index.sha256)
    assert len(names) == 1


def test_of_an_index_that_is_open_nothing_is_read_and_decoded_again(saver, tmp_path, monkeypatch):
    for number in range(2):
        save(saver, tmp_path / str(number), fresh(number))
    first, second = (ds.open(tmp_path / str(number), **SMALL) for number in range(2))
    entries = {key: first.index.tensor(key) for key in first.index.tensors}
    monkeypatch.setattr(second.index.tensors, "read", None)
    assert all(second.index.tensor(key) is entry for key, entry in entries.items())
    assert stored(tmp_path / "1") == wanted(fresh(1))
    alone = Checkpoint.open(tmp_path / "1", OPTIONS, reuse=False)
    assert all(alone.index.tensor(key) is not entry for key, entry in entries.items())


def test_what_is_known_of_an_index_goes_with_the_last_checkpoint_that_has_it(saver, tmp_path):
    save(saver, tmp_path / "c", fresh(0))
    checkpoint = ds.open(tmp_path / "c", **SMALL)
    entry = weakref.ref(checkpoint.index.tensor("w0").offsets)
    assert entry() is not None
    del checkpoint
    assert entry() is None


def test_a_changed_structure_is_planned_anew(saver, tmp_path):
    states = [fresh(0), fresh(0, rows=301), fresh(0) | {"more": torch.ones(3)}, {"w0": torch.ones(3).bool()}]
    states += [{"w0": torch.ones(3).to(torch.int8)}, fresh(1)]
    for number, tensors in enumerate(states * 2):
        save(saver, tmp_path / str(number), tensors)
        assert stored(tmp_path / str(number)) == wanted(tensors)


def test_more_structures_than_are_kept_are_saved_right(saver, tmp_path):
    for number in [*range(12), *range(12)]:
        tensors = {"w": random_tensor(torch.uint8, (number * 50 + 1,), number)}
        save(saver, tmp_path / str(number), tensors)
        assert stored(tmp_path / str(number)) == wanted(tensors)


def test_a_change_of_eagerness_is_planned_anew(saver, tmp_path):
    tensors = fresh(0)
    for number, mutability in enumerate([Mutability.NOW, Mutability.AT_FENCE, Mutability.NEVER] * 2):
        save(saver, tmp_path / str(number), tensors, mutability=mutability)
        assert stored(tmp_path / str(number)) == wanted(tensors)


def test_objects_are_serialized_anew(saver, tmp_path):
    for number in range(3):
        value = {"step": number, "more": "x" * number * 5000}
        save(saver, tmp_path / str(number), {}, {"x": value})
        assert ds.open(tmp_path / str(number), **SMALL).read_object("x") == value


# -- one directory twice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("same_process", [True, False])
def test_saving_again_into_a_directory_leaves_exactly_one_saves_files(saver, tmp_path, same_process):
    directory = tmp_path / "c"
    for number, tensors in enumerate([fresh(0), fresh(1), {"other": torch.ones(3)}, fresh(2)]):
        again = saver if same_process else new_saver()
        save(again, directory, tensors, {"x": number})
        manifest = ds.open(directory, **SMALL).manifest
        names = {MANIFEST_NAME, manifest.index.name, *(file.name for file in manifest.files)}
        assert {path.name for path in directory.iterdir()} == names
        assert len(names) == 3
        assert stored(directory) == wanted(tensors)
        assert verify(directory, options=OPTIONS).good
        if not same_process:
            again.close()


def test_saving_again_leaves_the_files_of_others(saver, tmp_path):
    save(saver, tmp_path / "c", fresh(0))
    (tmp_path / "c" / "metadata.json").write_text("{}")
    save(saver, tmp_path / "c", fresh(1))
    assert (tmp_path / "c" / "metadata.json").read_text() == "{}"


def test_until_a_new_save_is_published_the_old_one_is_whole(saver, tmp_path):
    first, second = fresh(0), fresh(1)
    save(saver, tmp_path / "c", first)
    publication = saver.start(tmp_path / "c", State(second, mutability=Mutability.AT_FENCE))
    FENCE.wait("the step")
    assert stored(tmp_path / "c") == wanted(first)
    assert publication.wait() is Outcome.PUBLISHED
    assert stored(tmp_path / "c") == wanted(second)


def test_a_damaged_index_of_the_same_name_is_replaced(saver, tmp_path):
    save(saver, tmp_path / "c", fresh(0))
    (index,) = (tmp_path / "c").glob("index-*")
    index.write_bytes(index.read_bytes()[:-1] + b"\xff")
    save(saver, tmp_path / "c", fresh(1))
    assert stored(tmp_path / "c") == wanted(fresh(1))


def test_no_file_is_ever_overwritten(saver, tmp_path):
    publication = save(saver, tmp_path / "c", fresh(0))
    (old,) = data_files(tmp_path / "c")
    content = old.read_bytes()
    context = publication.save.context
    taken = tmp_path / "c" / type(context.save_id)(
        context.save_id.run_id, context.save_id.ordinal + 1
    ).data_file_name(0)  # fmt: skip
    taken.write_bytes(b"somebody else's")
    failed = save(saver, tmp_path / "c", fresh(1))
    assert failed.outcome is Outcome.FAILED
    assert "File exists" in failed.error
    assert taken.read_bytes() == b"somebody else's"
    assert old.read_bytes() == content
    assert stored(tmp_path / "c") == wanted(fresh(0))


def test_two_saves_under_way_are_both_published(saver, tmp_path):
    states = [fresh(0), fresh(1)]
    publications = [
        saver.start(tmp_path / str(n), State(tensors, mutability=Mutability.AT_FENCE))
        for n, tensors in enumerate(states)
    ]
    FENCE.wait("the step")
    assert [publication.wait() for publication in publications] == [Outcome.PUBLISHED] * 2
    for number, tensors in enumerate(states):
        assert stored(tmp_path / str(number)) == wanted(tensors)


# -- a save before the previous one is finished -----------------------------------------------------------


def lazy(tensors):
    return State(tensors, mutability=Mutability.AT_FENCE)


@pytest.mark.parametrize("end", ["published", "failed", "abandoned"])
def test_a_save_that_is_over_is_not_unfinished(tmp_path, end):
    saver = new_saver(faults="write:1:EIO" if end == "failed" else "")
    first = saver.start(tmp_path / "first", lazy(fresh(0)))
    assert saver.unfinished_save() == tmp_path / "first"
    first.abandon("the queue was aborted") if end == "abandoned" else first.wait()
    assert saver.unfinished_save() is None
    saver.close()


def test_a_save_that_failed_on_this_rank_alone_is_unfinished(saver, tmp_path):
    """Other ranks know nothing of it before the agreement, and have to decide alike."""
    first = saver.start(tmp_path / "first", lazy(fresh(0)))
    first.save.fail(OSError("here only"))
    assert saver.unfinished_save() == tmp_path / "first"
    assert first.wait() is Outcome.FAILED and "here only" in first.error
    assert saver.unfinished_save() is None


def test_a_save_that_waits_for_slots_says_how_long_and_what_was_unfinished(tmp_path, caplog):
    path = tmp_path / "reports.jsonl"
    saver = new_saver(report_file=str(path), faults="write:0:stall=30", write_threads=1)
    big = {"w": random_tensor(torch.uint8, (12 << 20,), 1)}  # more than the pool
    with caplog.at_level("INFO"):
        publications = [saver.start(tmp_path / str(n), lazy(big)) for n in range(2)]
        FENCE.wait("the step")
        assert [publication.wait() for publication in publications] == [Outcome.PUBLISHED] * 2
    saver.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["saves_before"], second["saves_before"]) == (0, 1)
    assert second["slot_wait_ms"] > 0
    assert f"waited {second['slot_wait_ms']:.1f} ms for slots, with 1 unfinished saves before" in caplog.text
