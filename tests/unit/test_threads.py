"""Pools of threads: where no thread, or no further one, can be started, where one is lost, or hangs."""

from __future__ import annotations

import _thread
import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from megatron_datastates.errors import EngineError
from megatron_datastates.threads import BackgroundThread, ThreadPool
from tests.support.waiting import eventually


@pytest.fixture
def started(monkeypatch):
    """Lets threads start; the returned list says how many more may."""
    left, start = [1], BackgroundThread.start

    def limited(thread: BackgroundThread) -> None:
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(BackgroundThread, "start", limited)
    return left


def held_up(begun: threading.Event, go_on: threading.Event) -> int:
    begun.set()
    assert go_on.wait(60)
    return 1


def error_of(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        function()
    return caught.value


def test_without_threads_the_caller_makes_the_calls(started):
    started[0] = 0
    with ThreadPool(3) as pool:
        assert pool.map(lambda n: (n, threading.get_ident()), range(3)) == [
            (n, threading.get_ident()) for n in range(3)
        ]
        assert isinstance(error_of(pool.submit(lambda: 1 // 0).result), ZeroDivisionError)


def test_a_call_in_the_queue_of_a_thread_that_runs_is_made_once(started):
    begun, go_on, calls = threading.Event(), threading.Event(), []
    with ThreadPool(2) as pool:
        first = pool.submit(held_up, begun, go_on)
        assert begun.wait(60)
        second = pool.submit(lambda: calls.append(threading.get_ident()))
        assert second.done()
        go_on.set()
        assert first.result() == 1
    assert calls == [threading.get_ident()]


def test_no_more_threads_work_at_a_time_than_asked_for():
    lock, at_once, most = threading.Lock(), 0, 0

    def work(number: int) -> int:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        eventually(lambda: most == 3)
        with lock:
            at_once -= 1
        return number

    with ThreadPool(3) as pool:
        assert pool.map(work, range(50)) == list(range(50))
        assert pool.map(work, range(50)) == list(range(50))
    assert most == 3 and len(pool._threads) <= 50


def test_the_first_error_is_raised_and_what_waits_is_not_begun():
    begun, go_on, calls = threading.Event(), threading.Event(), []
    with pytest.raises(ZeroDivisionError), ThreadPool(1) as pool:
        pool.submit(held_up, begun, go_on)
        assert begun.wait(60)
        pool.submit(calls.append, 1)
        threading.Timer(0.05, go_on.set).start()
        raise ZeroDivisionError  # as of an earlier call
    assert go_on.is_set(), "the call under way was not waited for"
    assert not calls
    with pytest.raises(ValueError, match="1"), ThreadPool(2) as pool:
        pool.map(lambda n: error_of(partial(int, "x")) and int("x") if n > 1 else [0].index(n), range(4))


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("asks", ["submit", "map"])
def test_an_error_is_forgotten_with_its_call(started, threads, asks):
    """Without the garbage collector: its frames may hold tensors."""
    started[0] = threads

    class Error(Exception):
        pass

    def fail(number: int) -> None:
        raise Error

    gc.disable()
    try:
        try:
            with ThreadPool(1) as pool:
                pool.submit(fail, 0).result() if asks == "submit" else pool.map(fail, range(2))
        except Error as raised:
            error = weakref.ref(raised)
        eventually(lambda: error() is None)  # the thread's own reference is gone with the thread
    finally:
        gc.enable()


def test_without_threads_no_call_is_kept_for_the_life_of_the_pool(started):
    """What they read into may be all that is read."""
    started[0] = 0

    class Buffer:
        pass

    buffer = Buffer()
    kept = weakref.ref(buffer)
    with ThreadPool(1) as pool:
        pool.submit(id, buffer).result()
        del buffer
        gc.collect()
        assert kept() is None


def test_a_call_that_is_not_made_keeps_no_argument_and_its_result_is_an_error():
    """After an error of a call before it. The error's frames keep the calls, and arguments may be buffers."""

    class Buffer:
        pass

    go_on, buffer = threading.Event(), Buffer()
    kept = weakref.ref(buffer)
    with pytest.raises(ZeroDivisionError), ThreadPool(1) as pool:
        pool.submit(go_on.wait, 60)
        left = pool.submit(id, buffer)
        del buffer
        threading.Timer(0.05, go_on.set).start()
        raise ZeroDivisionError
    asked = BackgroundThread(lambda: error_of(left.result))
    assert kept() is None
    asked.start()
    assert asked.join(60) and not asked.is_lost
    assert isinstance(error_of(left.result), EngineError)


def test_an_interrupt_of_the_wait_at_its_end_leaves_what_waits_unmade():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs with &
    begun, go_on, calls = threading.Event(), threading.Event(), []
    try:
        with pytest.raises(KeyboardInterrupt), ThreadPool(1) as pool:
            pool.submit(held_up, begun, go_on)
            pool.submit(calls.append, 1)
            assert begun.wait(60)
            threading.Timer(0.2, _thread.interrupt_main).start()
    finally:
        signal.signal(signal.SIGINT, before)
        go_on.set()
    assert all(thread.join(60) for thread in pool._threads) and not calls


def test_a_thread_that_dies_at_its_start_is_an_error(monkeypatch):
    monkeypatch.setattr(BackgroundThread, "_run", id)
    with (
        pytest.raises(EngineError, match="the thread that reads ended too early"),
        ThreadPool(2, "reads") as pool,
    ):
        pool.map(len, [[1], [2]])
    with ThreadPool(1) as pool:
        call = pool.submit(int)
        eventually(call.done)  # for who polls it
        assert isinstance(error_of(call.result), EngineError)


HANGS = """
import threading
from megatron_datastates.threads import ThreadPool
begun = threading.Event()
def hang():
    begun.set()
    threading.Event().wait()
with ThreadPool(1) as pool:
    pool.submit(hang)
    begun.wait()
    raise KeyboardInterrupt
"""


def test_an_interrupted_program_ends_though_storage_hangs():
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stderr.endswith("KeyboardInterrupt\n")
