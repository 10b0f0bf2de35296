"""However a save ends, and whatever goes on beside it: threads that cannot start, exits, forks, children."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.config import MIB
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.reader import read_footer
from megatron_datastates.engine.staging import FileSave
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline import publication as publication_module
from megatron_datastates.pipeline import publisher as publisher_module
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.publishing import indexes
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.publishing.directory_publisher import DirectoryPublisher
from megatron_datastates.pipeline.runs.runs import is_published
from megatron_datastates.pipeline.saving import rank_save
from megatron_datastates.pipeline.saving.background import AFTER_POLL_SECONDS, COPIES_AFTER_POLL_SECONDS
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Mutability
from megatron_datastates.threads import BackgroundThread
from tests.support.descriptors import open_files
from tests.support.programs import Programs
from tests.unit.states import OPTIONS, SMALL, State, bits, data_files, new_saver, random_tensor, save

BIG = {"w": random_tensor(torch.uint8, (6 << 20,), 1)}
LIMIT_SECONDS = 60
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


# -- states -----------------------------------------------------------------------------------------------


def test_a_save_goes_through_its_states(saver, tmp_path, monkeypatch):
    """The finishing thread is held in each of them until it was seen."""
    may_end = [hold(monkeypatch, name) for name in ("wait_written", "wait_durable")]
    publication = saver.start(tmp_path / "c", State(BIG, {"x": 1}, Mutability.AT_FENCE))
    seen = [publication.state.value]
    FENCE.wait("the step")
    seen.append(publication.state.value)
    for event in may_end:
        event.set()
        while publication.state.value == seen[-1]:
            time.sleep(0.001)
        seen.append(publication.state.value)
    publication.wait()
    seen.append(publication.state.value)
    assert seen == ["enqueued", "staged", "written", "durable", "published"]


def test_a_file_is_sealed_only_once_nothing_can_have_changed_before_it_was_copied(saver, tmp_path):
    """Else a kill could leave a file that looks sound, and mixes values from before and after a change."""
    publication = saver.start(tmp_path / "c", State(BIG, {"x": 1}, Mutability.AT_FENCE))
    while not publication.save._save.wait_written():
        pass
    assert not publication.join(0.3), "nobody has polled, and no fence was reached"
    (path,) = data_files(tmp_path / "c")
    with pytest.raises(DataStatesError):
        read_footer(path, path.stat().st_size)
    publication.save.mark_torn("a step without a fence")
    assert publication.wait() is Outcome.FAILED
    assert publication.join(LIMIT_SECONDS), "the finishing thread removes the file"
    assert not data_files(tmp_path / "c")


def test_a_save_that_is_taken_back_just_as_its_file_is_durable_leaves_none(saver, tmp_path, monkeypatch):
    is_durable, goes_on, decode = threading.Event(), threading.Event(), rank_save.decode_trailer

    def late(*args):
        is_durable.set()
        goes_on.wait(LIMIT_SECONDS)
        return decode(*args)

    monkeypatch.setattr(rank_save, "decode_trailer", late)
    publication = saver.start(tmp_path / "c", State(BIG))
    assert is_durable.wait(LIMIT_SECONDS)
    publication.abandon("the queue was aborted")
    goes_on.set()
    assert publication.join(LIMIT_SECONDS) and not data_files(tmp_path / "c")


def hold(monkeypatch: pytest.MonkeyPatch, name: str) -> threading.Event:
    """Makes a wait of the finishing thread last until the event is set."""
    wait, may_end = getattr(FileSave, name), threading.Event()
    monkeypatch.setattr(FileSave, name, lambda file: may_end.wait(0.1) and wait(file))
    return may_end


def test_a_failed_save_is_failed_before_and_after_it_is_agreed(tmp_path):
    saver = new_saver(faults="write:1:EIO")
    publication = saver.start(tmp_path / "c", State(BIG))
    while not publication.save.failure:
        pass
    assert publication.state.value == "failed"
    publication.wait()
    assert publication.state.value == "failed"
    saver.close()


# -- threads that cannot start ---------------------------------------------------------------------------


def _at_start_of(monkeypatch, name: str, act: Callable[[BackgroundThread], None]) -> None:
    """Has a thread that is to run the function of this name do something first, once."""
    start = BackgroundThread.start

    def started(thread: BackgroundThread) -> None:
        function = thread._function
        if getattr(function, "func", function).__name__ == name:
            monkeypatch.setattr(BackgroundThread, "start", start)
            act(thread)
        start(thread)

    monkeypatch.setattr(BackgroundThread, "start", started)


@pytest.fixture
def no_thread(monkeypatch):
    """Lets no thread start that runs the function of this name, once."""

    def deny(thread: BackgroundThread) -> None:
        raise RuntimeError("can't start new thread")

    return lambda name: _at_start_of(monkeypatch, name, deny)


@pytest.fixture
def lost_thread(monkeypatch):
    """Ends the thread that runs the function of this name, once, before it has called anything of ours."""

    def lose(thread: BackgroundThread) -> None:
        thread._run = id  # takes the arguments, and returns

    return lambda name: _at_start_of(monkeypatch, name, lose)


@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
def test_a_finishing_thread_that_dies_at_its_start_fails_the_save(saver, tmp_path, lost_thread, mutability):
    lost_thread("_finish")
    publication = saver.start(tmp_path / "c", State(BIG, {"x": 1}, mutability))
    began = time.monotonic()
    FENCE.clear("the step")
    assert time.monotonic() - began < OPTIONS.fence_deadline / 2
    assert publication.wait() is Outcome.FAILED
    assert (
        "the thread that finishes the save ended too early: is there not enough memory?" in publication.error
    )
    assert publication.join(LIMIT_SECONDS), "a thread removes the file"
    assert data_files(tmp_path / "c") == [] and not FENCE.readers
    assert save(saver, tmp_path / "c", BIG).outcome is Outcome.PUBLISHED


def test_a_publishing_thread_that_dies_at_its_start_fails_the_save(saver, tmp_path, lost_thread):
    lost_thread("_publish")
    publication = saver.start(tmp_path / "c", State(BIG))
    assert publication.wait() is Outcome.FAILED
    assert "the thread that publishes the save ended too early" in publication.error
    assert not is_published(tmp_path / "c") and data_files(tmp_path / "c") == []
    assert save(saver, tmp_path / "c", BIG).outcome is Outcome.PUBLISHED


def test_an_awaited_save_whose_finishing_thread_dies_fails(saver, tmp_path, lost_thread):
    lost_thread("_finish")
    save_ = saver.start(tmp_path / "c", State(BIG)).save
    save_.await_durable()
    assert save_.failure is not None


def test_an_abandoned_save_whose_finishing_thread_has_died_leaves_no_file(saver, tmp_path, lost_thread):
    lost_thread("_finish")
    publication = saver.start(tmp_path / "c", State(BIG))
    assert publication.save.join(LIMIT_SECONDS)
    publication.abandon("the queue was aborted")
    assert publication.join(LIMIT_SECONDS), "a thread removes the file"
    assert data_files(tmp_path / "c") == [] and not publication.is_at_work


def test_an_abandoned_save_that_never_began_is_not_waited_for(saver, tmp_path):
    def fails():
        raise ValueError("there is no state")

    publication = saver.start(tmp_path / "c", fails)
    began = time.monotonic()
    publication.abandon("the queue was aborted")
    assert time.monotonic() - began < rank_save._DROPPING_SECONDS / 2
    assert publication.poll() is Outcome.FAILED


def test_a_thread_that_raises_is_lost_and_one_that_returns_is_not(monkeypatch):
    threads = [BackgroundThread(functools.partial(time.sleep, s)) for s in (0.0, -1.0)]
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    for thread in threads:
        thread.start()
        assert thread.join(LIMIT_SECONDS)
    assert [thread.is_lost for thread in threads] == [False, True]


@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
def test_a_finishing_thread_that_cannot_start_is_the_trainers(saver, tmp_path, no_thread, mutability):
    no_thread("_finish")
    publication = saver.start(tmp_path / "c", State(BIG, {"x": 1}, mutability))
    assert publication.save.is_durable and publication.save.join(0.0)
    assert not FENCE.readers and not FENCE._standing
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    assert verify(tmp_path / "c", options=OPTIONS).good


def test_a_save_without_a_finishing_thread_fails_as_others_do(tmp_path, no_thread):
    saver = new_saver(faults="write:1:EIO")
    no_thread("_finish")
    publication = saver.start(tmp_path / "c", State(BIG, {"x": 1}))
    assert publication.wait() is Outcome.FAILED and "Input/output error" in publication.error
    assert not is_published(tmp_path / "c") and data_files(tmp_path / "c") == []
    saver.close()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_publishing_thread_that_cannot_start_is_the_trainers(
    saver, tmp_path, no_thread, monkeypatch, is_awaited
):
    ran: list[tuple[Path, threading.Thread]] = []
    publish = DirectoryPublisher.publish

    def noting(publisher: DirectoryPublisher) -> None:
        publish(publisher)
        ran.append((publisher.directory, threading.current_thread()))

    monkeypatch.setattr(DirectoryPublisher, "publish", noting)
    first = saver.start(tmp_path / "first", State(BIG))
    while first.publisher._thread is None:
        first.poll()
    no_thread("_publish")
    second = saver.start(tmp_path / "second", State(BIG, {"x": 1}))
    while second.poll() is Outcome.PENDING:
        second.postponement.is_awaited = is_awaited
    assert second.outcome is Outcome.PUBLISHED, second.error
    (one, beside), (other, here) = ran
    assert one == tmp_path / "first" and beside is not threading.current_thread()
    assert other == tmp_path / "second" and here is threading.current_thread()
    assert verify(tmp_path / "second", options=OPTIONS).good


@pytest.mark.parametrize("looks", [3, 10**9], ids=["late", "never"])
def test_a_trainer_that_publishes_looks_for_the_indexes_itself(
    saver, tmp_path, no_thread, monkeypatch, looks
):
    gather = Collectives.gather_to_first

    class Indexes:
        looks = 0

        def __init__(self, *args):
            self.result = gather(*args).result

        def is_over(self) -> bool:
            self.looks += 1
            return self.looks >= looks

    monkeypatch.setattr(Collectives, "gather_to_first", lambda *args: Indexes(*args))
    monkeypatch.setattr(indexes, "PATIENCE_SECONDS", 0.1)
    no_thread("_publish")
    publication = saver.start(tmp_path / "c", State(BIG))
    assert publication.wait() is (Outcome.PUBLISHED if looks == 3 else Outcome.FAILED)
    assert looks == 3 or "the ranks' indexes did not arrive" in publication.error
    assert is_published(tmp_path / "c") == bool(data_files(tmp_path / "c")) == (looks == 3)


def test_a_trainer_publishes_only_after_earlier_saves(saver, tmp_path, no_thread, monkeypatch):
    second_failed = threading.Event()
    monkeypatch.setattr(publisher_module, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(DirectoryPublisher, "publish", lambda publisher: second_failed.wait(LIMIT_SECONDS))
    first = saver.start(tmp_path / "first", State(BIG))
    while first.publisher._thread is None:
        first.poll()
    no_thread("_publish")
    second = saver.start(tmp_path / "second", State(BIG))
    assert second.wait() is Outcome.FAILED
    second_failed.set()
    assert "can't start new thread" in second.error
    second.join()
    assert data_files(tmp_path / "second") == []
    assert first.wait() is Outcome.PUBLISHED


def test_threads_that_the_engine_cannot_start_are_reported_by_the_first_save(tmp_path, monkeypatch, caplog):
    saver = new_saver()
    monkeypatch.setattr(saver, "_get_engine", lambda: (_ for _ in ()).throw(OSError(11, "no thread")))
    saver.warm_up()
    assert "staging memory was not allocated before the first save: [Errno 11] no thread" in caplog.text
    assert save(saver, tmp_path / "c", BIG).outcome is Outcome.FAILED
    monkeypatch.undo()
    assert save(saver, tmp_path / "c", BIG).outcome is Outcome.PUBLISHED
    saver.close()


def test_a_thread_of_the_parent_is_not_waited_for_in_a_forked_child() -> None:
    ended = threading.Event()
    thread = BackgroundThread(ended.wait)
    thread.start()
    assert not thread.join(0.0)
    child = os.fork()
    if child == 0:
        os._exit(not thread.join())
    _, status = os.waitpid(child, 0)
    assert status == 0
    ended.set()
    assert thread.join(LIMIT_SECONDS)


def test_a_thread_in_the_background_takes_no_core_from_the_trainer_that_wakes_it() -> None:
    policies: list[int] = []
    thread = BackgroundThread(lambda: policies.append(os.sched_getscheduler(0)))
    thread.start()
    assert thread.join(LIMIT_SECONDS)
    assert (policies, os.sched_getscheduler(0)) == ([os.SCHED_BATCH], os.SCHED_OTHER)


def test_a_policy_that_may_not_be_set_changes_nothing(monkeypatch) -> None:
    def denied(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", denied)
    ran = threading.Event()
    thread = BackgroundThread(ran.set)
    thread.start()
    assert thread.join(LIMIT_SECONDS) and ran.is_set()


def test_a_poll_starts_the_publisher_later_unless_the_trainer_waits(saver, tmp_path, monkeypatch) -> None:
    slept: list[float] = []
    init = BackgroundThread.__init__

    def noting(thread, function, after=None, delay=0.0) -> None:
        slept.append(delay)
        init(thread, function, after, delay)

    monkeypatch.setattr(BackgroundThread, "__init__", noting)
    publication = saver.start(tmp_path / "polled", State(BIG))
    FENCE.wait("the step")
    while publication.poll() is Outcome.PENDING:
        time.sleep(0.002)
    assert slept == [0.0, AFTER_POLL_SECONDS, AFTER_POLL_SECONDS]  # the last one writes the report
    save(saver, tmp_path / "awaited", BIG)
    assert slept[3:] == [0.0, 0.0, 0.0]


def test_who_waits_for_a_long_write_polls_less_and_less_often(saver, tmp_path, monkeypatch) -> None:
    """In time that is made up: it passes only while the trainer sleeps."""
    is_written = hold(monkeypatch, "wait_durable")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) >= 10:
            is_written.set()
        real.sleep(0.001)

    real = time
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=sleep, perf_counter=real.perf_counter)
    monkeypatch.setattr(publication_module, "time", clock)
    publication = saver.start(tmp_path / "c", State(BIG))
    FENCE.wait("the step")
    assert publication.wait() is Outcome.PUBLISHED
    assert slept[0] == 0.002 and max(slept) == 0.05
    assert len(slept) < 500  # 5,000 of 2 ms
    assert slept[-1] < 0.05  # as publishing begins with 2 ms again


def test_a_poll_starts_copies_later_unless_the_trainer_waits(tmp_path, monkeypatch) -> None:
    allowed: list[float] = []
    allow = FileSave.allow_lazy_copies

    def noting(file, seconds=0.0, **options) -> None:
        allowed.append(seconds)
        allow(file, seconds, **options)

    monkeypatch.setattr(FileSave, "allow_lazy_copies", noting)
    saver = new_saver(lazy_delay=3600.0)  # copies do not begin by themselves
    publication = saver.start(tmp_path / "polled", State(BIG, mutability=Mutability.AT_FENCE))
    allowed.clear()
    publication.poll()
    assert allowed == [COPIES_AFTER_POLL_SECONDS]
    FENCE.wait("the step")  # does not wait so long
    assert allowed[1:] == [0.0]
    publication.wait()
    allowed.clear()
    saver.start(tmp_path / "awaited", State(BIG, mutability=Mutability.AT_FENCE)).wait()
    assert allowed[-1] == 0.0 and COPIES_AFTER_POLL_SECONDS not in allowed
    saver.close()


# -- the end of the interpreter ---------------------------------------------------------------------------

PROGRAM = """
import atexit, dataclasses, os, sys, threading, time
from pathlib import Path
import torch
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.reader import read_footer
from megatron_datastates.engine.staging import FileSave
from megatron_datastates.errors import DataStatesError
from megatron_datastates.pipeline import saver_pool
from megatron_datastates.threads import BackgroundThread
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.providers.base import Mutability
from tests.unit.states import OPTIONS, State, random_tensor

folder = Path(sys.argv[1])
tensors = {"w": random_tensor(torch.uint8, (6 << 20,), 1)}

def start(name, mutability=Mutability.AT_FENCE, **options):
    saver = saver_pool.saver_for(dataclasses.replace(OPTIONS, **options))
    return saver.start(folder / name, State(tensors, {"x": 1}, mutability))

def poll_until(publication, condition):
    while not condition():
        publication.poll()
        time.sleep(0.01)

assert start("before", Mutability.NOW).wait() is Outcome.PUBLISHED
"""
# What the program does then -> (its exit code, words of its stderr, whether the save is published)
EXITS: dict[str, tuple[str, int, str, bool]] = {
    "just started": ('start("c", Mutability.NOW)', 0, "", False),
    "at the fence": ('start("c")', 0, "", False),
    "nothing begun": ("saver_pool.saver_for(OPTIONS).warm_up()", 0, "", False),
    "writing slowly": ('start("c", write_limit=1 << 20); time.sleep(0.1); FENCE.wait("step")', 0, "", False),
    "stalled open": ('start("c", faults="open:1:stall=700"); time.sleep(0.1)', 0, "", False),
    "stalled write": ('start("c", faults="write:0:stall=700"); time.sleep(0.1)', 0, "", False),
    "stalled sync": (
        'c = start("c", faults="sync:1:stall=700"); FENCE.wait("step"); time.sleep(0.3)', 0, "", False,
    ),
    "durable": (
        'c = start("c"); FENCE.wait("step")\nwhile not c.save.is_durable: time.sleep(0.01)', 0, "", False,
    ),
    "failed, not reported": ('c = start("c", faults="write:1:EIO"); time.sleep(0.2)', 0, "", False),
    "writing the manifest": (
        'c = start("c", faults="rename manifest:1:stall=500"); FENCE.wait("step")\n'
        "poll_until(c, lambda: c.publisher._thread is not None)", 0, "", True,
    ),
    "published, not reported": (
        'c = start("c"); FENCE.wait("step")\npoll_until(c, lambda: c.publisher.is_done)', 0, "", True,
    ),
    "three at once": (
        'start("c"); start("d"); start("e"); start("f", write_limit=1)', 0, "", False,
    ),
    "exception": ('start("c"); raise RuntimeError("it broke")', 1, "RuntimeError: it broke", False),
    "sys.exit": ('start("c"); sys.exit(7)', 7, "", False),
    "interrupt": ('start("c"); raise KeyboardInterrupt', -2, "KeyboardInterrupt", False),
    "sys.exit in a thread": (
        'start("c"); threading.Thread(target=sys.exit, args=(3,)).start()', 0, "", False,
    ),
    "a thread that goes on": (
        'start("c"); threading.Thread(target=time.sleep, args=(0.5,)).start()', 0, "", False,
    ),
    "exit handlers": ('atexit.register(FENCE.wait, "an exit handler"); start("c")', 0, "", False),
}  # fmt: skip


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(programs: Programs, tmp_path: Path) -> Run:
    """Runs PROGRAM and what follows it, with the test's folder and `arguments`."""

    def run_program(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return programs.run(["-c", PROGRAM + program, tmp_path, *arguments], timeout=LIMIT_SECONDS)

    return run_program


@pytest.mark.parametrize("way", EXITS)
def test_the_interpreter_ends_in_any_state_of_a_save(run, tmp_path, way):
    program, code, words, published = EXITS[way]
    ended = run(program)
    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr and "Fatal" not in ended.stderr, ended.stderr
    if code == 0:
        assert "Traceback" not in ended.stderr, ended.stderr
    assert verify(tmp_path / "before", options=OPTIONS).good
    for name in "cdef":
        assert is_published(tmp_path / name) == (published and name == "c"), ended.stderr
        if not published:
            assert not list((tmp_path / name).glob("*"))
    if published:
        assert verify(tmp_path / "c", options=OPTIONS).good


UNTIL_IT_ENDS = """
import _thread
from concurrent.futures import ThreadPoolExecutor
import megatron_datastates as ds
def until_the_interpreter_ends():
    try:
        for _ in range(100):  # some releases go on starting threads
            _thread.start_new_thread(int, ())
            time.sleep(0.01)
    except RuntimeError:
        pass
"""
LATE = {  # where a save begins once Python starts no threads any more
    "exit handler": "atexit.register(late)",
    "thread": "threading.Thread(target=late).start()",
    "pool": "ThreadPoolExecutor(1).submit(late)",
}


@pytest.mark.parametrize("compress", [0, 1])
@pytest.mark.parametrize("where", LATE)
def test_a_save_begun_while_the_interpreter_ends_is_published(run, tmp_path, where, compress):
    program = f"""
def late():
    until_the_interpreter_ends()
    ds.save(tensors, folder / "c", compress={compress})
{LATE[where]}
"""
    ended = run(UNTIL_IT_ENDS + program)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert verify(tmp_path / "c", options=OPTIONS).good


def test_compression_goes_on_while_the_interpreter_ends(run, tmp_path):
    """Its pool takes no work any more."""
    program = """
import megatron_datastates as ds
save = ds.async_save(tensors, folder / "c", lazy=True, lazy_delay=60, compress=1)
atexit.register(save.wait)
"""
    ended = run(program)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert verify(tmp_path / "c", options=OPTIONS).good


@pytest.mark.parametrize("closes_early", [False, True])
def test_the_end_of_a_program_waits_for_saves_by_dcp(run, tmp_path, closes_early):
    program = f"""
import torch.distributed.checkpoint as dcp
from megatron_datastates.dcp import DataStatesWriter
class Planner(dcp.DefaultSavePlanner):
    def resolve_data(self, item):
        until_the_interpreter_ends()
        time.sleep(0.1)  # savers of other kinds are closed
        return super().resolve_data(item)
if {closes_early}:  # as once a save was to go to an object store
    saver_pool._close_before_pools()
dcp.async_save(tensors, storage_writer=DataStatesWriter(folder / "c"), planner=Planner(), no_dist=True)
"""
    ended = run(UNTIL_IT_ENDS + program)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert verify(tmp_path / "c", options=OPTIONS).good


@pytest.mark.parametrize("reports", ["", "reports.jsonl"])
def test_exit_handlers_may_wait_for_saves_that_are_under_way(run, tmp_path, reports):
    program = """
file = sys.argv[2] and str(folder / sys.argv[2])
saves = [start(name, Mutability.NOW, report_file=file) for name in "cd"]
atexit.register(lambda: print(*(save.wait().name for save in saves), saves[0].error, saves[1].error))
"""
    ended = run(program, reports)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "PUBLISHED PUBLISHED None None\n", ended.stderr
    for name in "cd":
        assert verify(tmp_path / name, options=OPTIONS).good
    if reports:
        assert len((tmp_path / reports).read_text().splitlines()) == 2


HUNG_DEVICE = """
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.fake_cuda.provider import DeviceTensors
from megatron_datastates.engine import staging
from tests.native.fake_cuda.provider import label_as_device
import pytest
label_as_device(pytest.MonkeyPatch())
cuda = FakeCuda(Path(sys.argv[2]))
stream = cuda.new_stream()
staging._current_stream = lambda device: stream
from megatron_datastates.pipeline import saver as module
module._CLOSING_SECONDS = 0.5
cuda.hold_stream(stream)  # a kernel waits for a rank that is dead
saver = saver_pool.saver_for(dataclasses.replace(OPTIONS, driver=cuda.path, tripwire=False))
publication = saver.start(folder / "c", DeviceTensors(tensors))
FENCE.wait("the step")
"""


def test_a_device_that_hangs_keeps_no_program_from_its_end(run, tmp_path):
    from tests.native.fake_cuda.driver import build

    ended = run(HUNG_DEVICE, build(tmp_path))
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert "a copy or a write still hangs after 0.5 s and is abandoned" in ended.stderr
    assert not is_published(tmp_path / "c")
    assert verify(tmp_path / "before", options=OPTIONS).good


HUNG_STORAGE = """
import contextlib
from types import SimpleNamespace
from megatron_datastates.pipeline import saver as module
from megatron_datastates.pipeline.publishing import presence
module._CLOSING_SECONDS = 0.5
presence._FEW_FILES = 0  # as where there are more files than that
asked = threading.Event()

def hang(**how):
    asked.set()
    time.sleep(1000)

def scandir(directory):
    names = os.listdir(directory)
    is_file = lambda **how: True
    return contextlib.nullcontext([SimpleNamespace(name=name, is_file=is_file, stat=hang) for name in names])

presence.os = SimpleNamespace(scandir=scandir, DirEntry=os.DirEntry)
poll_until(start("c", Mutability.NOW), asked.is_set)
"""


def test_storage_that_does_not_answer_when_files_are_looked_at_keeps_no_program_from_its_end(run, tmp_path):
    ended = run(HUNG_STORAGE)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert "still hangs after 0.5 s: whether it was published is not known" in ended.stderr
    assert not is_published(tmp_path / "c")


# -- children ---------------------------------------------------------------------------------------------


class Watching(torch.utils.data.Dataset):
    """Items say which files the worker that made them has open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> tuple[int, str]:
        FENCE.wait("a step in a worker")  # of nobody's save
        return os.getpid(), ",".join(open_files(self.folder))


@pytest.fixture
def slow(tmp_path):
    """A save in mid-write, until its saver is closed or it is waited for."""
    saver = new_saver(faults="write:0:stall=100", write_threads=1)
    publication = saver.start(tmp_path / "c", State(BIG, {"x": 1}, Mutability.AT_FENCE))
    while not (publication.save.awaited() or (0,))[0]:  # its descriptor is known to be this process's by then
        pass
    yield publication
    assert not publication.save.failure
    FENCE.wait("the step")
    assert publication.wait() is Outcome.PUBLISHED
    saver.close()
    assert verify(tmp_path / "c", options=OPTIONS).good
    assert bits(ds.open(tmp_path / "c", **SMALL).read_tensor("w")) == bits(BIG["w"])


def test_data_loaders_forked_in_mid_save_keep_no_file_open(slow, tmp_path):
    loader = torch.utils.data.DataLoader(
        Watching(tmp_path), num_workers=2, batch_size=None, timeout=LIMIT_SECONDS
    )
    reported = list(loader)
    assert len({pid for pid, _ in reported}) == 2 and os.getpid() not in {pid for pid, _ in reported}
    assert {files for _, files in reported} == {""}
    assert open_files(tmp_path) != [], "the save was over too early to prove anything"


def test_a_program_started_in_mid_save_keeps_no_file_open(slow, tmp_path):
    command = ["ls", "-l", "/proc/self/fd"]
    for close_fds in (True, False):
        reported = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True, close_fds=close_fds
        )
        assert str(tmp_path) not in reported.stdout
    assert open_files(tmp_path) != [], "the save was over too early to prove anything"


def in_process(method: str, work, *arguments) -> object:
    """Returns what `work` returns in a child of multiprocessing; fails if the child hangs or dies."""
    context = multiprocessing.get_context(method)
    reported = context.Queue()
    child = context.Process(target=lambda: reported.put(work(*arguments)))
    child.start()
    answer = reported.get(timeout=LIMIT_SECONDS)
    child.join(LIMIT_SECONDS)
    assert child.exitcode == 0
    return answer


def save_as_a_child(folder: Path, parents_files: Path) -> tuple[str, list[str]]:
    saver = new_saver()
    publication = save(saver, folder, BIG, {"x": 1}, Mutability.AT_FENCE)
    saver.close()
    return publication.outcome.name, open_files(parents_files)


def test_a_child_forked_in_mid_save_can_save(slow, tmp_path):
    outcome, files = in_process("fork", save_as_a_child, tmp_path / "child", tmp_path)
    assert (outcome, files) == ("PUBLISHED", [])
    assert verify(tmp_path / "child", options=OPTIONS).good


def end_the_parents_save(publication) -> list[object]:
    """Calls everything of a save that a child may call by mistake, or in an inherited exit handler."""
    rank_save = publication.save
    rank_save.fence("a step in a child")
    rank_save.mark_torn("a step in a child")
    rank_save.advance()
    reported = [rank_save.times()["writing"], rank_save.failure]
    publication.abandon("the child ends")
    rank_save.cancel_and_remove("the child ends")
    publication.join()
    return reported


def test_a_child_that_ends_its_parents_save_harms_nothing(slow, tmp_path):
    _, failure = in_process("fork", end_the_parents_save, slow)
    assert "this save belongs to the parent of this process" in failure
    assert data_files(tmp_path / "c") != []


def test_a_child_that_takes_back_its_parents_durable_save_harms_nothing(saver, tmp_path):
    publication = saver.start(tmp_path / "c", State(BIG, mutability=Mutability.AT_FENCE))
    FENCE.wait("the step")
    while not publication.save.is_durable:
        pass
    in_process("fork", end_the_parents_save, publication)
    assert publication.wait() is Outcome.PUBLISHED
    assert verify(tmp_path / "c", options=OPTIONS).good


def test_a_savers_copy_may_be_closed_in_a_child(slow, tmp_path):
    saver = new_saver()
    other = saver.start(tmp_path / "other", State(BIG, mutability=Mutability.AT_FENCE))
    in_process("fork", saver.close)
    FENCE.wait("the step")
    assert other.wait() is Outcome.PUBLISHED
    saver.close()
    assert verify(tmp_path / "other", options=OPTIONS).good


def test_small_files_are_not_kept_by_a_child(tmp_path, monkeypatch):
    """Forked while a manifest is being synced, as is its directory after it."""
    from megatron_datastates.engine import atomic_files
    from megatron_datastates.engine.faults import Faults

    reported = []

    def sync(descriptor: int) -> None:
        assert open_files(tmp_path) != []
        reported.append(in_process("fork", open_files, tmp_path))

    monkeypatch.setattr(atomic_files.os, "fsync", sync)
    atomic_files.write_whole(tmp_path / MANIFEST_NAME, b"x" * MIB, Faults(""), SaveId(1, 1))
    atomic_files.sync_file(tmp_path / MANIFEST_NAME)
    assert reported == [[], [], []]
