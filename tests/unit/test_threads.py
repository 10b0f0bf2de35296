"""Calls that are made where no thread, or no further one, can be started."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from megatron_datastates.threads import ThreadPool


@pytest.fixture
def started(monkeypatch):
    """Lets threads start; the returned list says how many more may."""
    left, start = [1], threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return left


def test_without_threads_the_caller_makes_the_calls(started):
    started[0] = 0
    with ThreadPool(3) as pool:
        assert list(pool.map(lambda n: (n, threading.get_ident()), range(3))) == [
            (n, threading.get_ident()) for n in range(3)
        ]
        assert isinstance(pool.submit(lambda: 1 // 0).exception(), ZeroDivisionError)


def test_a_call_in_the_queue_of_a_thread_that_runs_is_made_once(started):
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def wait() -> int:
        begun.set()
        assert go_on.wait(60)
        return 1

    with ThreadPool(2) as pool:
        first = pool.submit(wait)
        assert begun.wait(60)
        second = pool.submit(lambda: calls.append(threading.get_ident()))
        assert second.done()
        go_on.set()
        assert first.result() == 1
    assert calls == [threading.get_ident()]


def test_cancelled_calls_are_not_made(started):
    go_on, calls = threading.Event(), []
    with ThreadPool(1) as pool:
        first, second = pool.submit(go_on.wait, 60), pool.submit(calls.append, 1)
        assert second.cancel()
        go_on.set()
        assert first.result()
        with pytest.raises(CancelledError):
            second.result()
    assert not calls


@pytest.mark.parametrize("threads", [0, 1])
def test_an_error_is_forgotten_with_its_future(started, threads):
    """Without the garbage collector: its frames may hold tensors."""
    started[0] = threads

    class Error(Exception):
        pass

    def fail() -> None:
        raise Error

    gc.disable()
    try:
        with ThreadPool(1) as pool:
            future = pool.submit(fail)
            error = weakref.ref(future.exception())
        del future
        assert error() is None
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
