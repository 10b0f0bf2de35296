"""Threads of ours, alone and in pools: none keeps the interpreter from ending, since storage may hang.

Belongs here: how work comes to a thread, and what became of it. Does not belong here: when work in the
background of the trainer begins (pipeline/saving/background.py).
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from megatron_datastates.errors import EngineError
from megatron_datastates.flag import Flag

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
_LOOK_SECONDS = 0.1  # how often a wait for a thread looks whether there still is one


class _Mark(threading.local):
    is_in_background = False


_mark = _Mark()


def is_in_background() -> bool:
    """Returns whether this is one of our threads."""
    return _mark.is_in_background


class _Running:
    """Held by a started thread, and by nothing else: it is gone when the thread is, whatever ended that."""


class BackgroundThread:
    """A thread that does not keep the interpreter from ending, and whose `start` does not wait for it to run.

    threading.Thread.start returns when the thread runs. The thread then has the GIL, and the trainer waits
    until it releases it: milliseconds, in every save.

    Args:
        after: a started thread whose end the function waits for.
        delay: seconds that pass before that.
    """

    def __init__(
        self, function: Callable[[], None], after: BackgroundThread | None = None, delay: float = 0.0
    ) -> None:
        self._function: Callable[[], None] | None = function
        self._after = after
        self._delay = delay
        self._ended = Flag()
        self._has_returned = False  # the function
        self._running: weakref.ref[_Running] | None = None
        self._process = os.getpid()

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError if no thread can be started."""
        running = _Running()
        self._running = weakref.ref(running)
        _thread.start_new_thread(self._run, (running,))

    def join(self, seconds: float | None = None) -> bool:
        """Waits until the started thread has ended; returns False if it has not after `seconds`.

        Returns at once in a forked child, where the thread does not exist.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while os.getpid() == self._process and not self._ended.wait(
            max(min(deadline - time.monotonic(), _LOOK_SECONDS), 0.0)
        ):
            if self._running is not None and self._running() is None:  # it found no memory for its first call
                self._ended.set()
            elif time.monotonic() >= deadline:
                return False
        return True

    @property
    def has_begun(self) -> bool:
        """Whether the function may have been called."""
        return self._function is None

    @property
    def is_lost(self) -> bool:
        """Whether the started thread has ended before the function returned, as where memory lacks.

        Nobody else reports that: there may have been no memory to call the function, nor to handle its error.
        """
        return os.getpid() == self._process and self.join(0.0) and not self._has_returned

    def _run(self, running: _Running) -> None:
        after, function = self._after, self._function
        self._after = self._function = None  # a thread that has ended keeps nothing
        try:
            _mark.is_in_background = True
            _yield_to_wakers()
            time.sleep(self._delay)
            if after is not None:
                after.join()
            assert function is not None
            function()
            self._has_returned = True
        finally:
            del after, function
            self._ended.set()


def lost(work: str) -> EngineError:
    """Returns the error for a thread that is lost (BackgroundThread.is_lost)."""
    return EngineError(f"the thread that {work} ended too early: is there not enough memory?")


class Call(Generic[T]):
    """A call for another thread to make, and what came of it.

    Args:
        pool: whose threads make it.
    """

    def __init__(self, function: Callable[[], T], pool: ThreadPool | None = None) -> None:
        self._function, self._pool = function, pool
        self._result: T
        self._error: BaseException | None = None
        self._is_made = Flag()

    def make(self) -> None:
        """Calls the function. Never raises what it raises."""
        function, is_made = self._function, self._is_made
        del self._function  # and its arguments
        try:
            self._result = function()
        except BaseException as error:
            self._error = error
            del self  # the frames of an error would keep it, and it keeps the error
        is_made.set()

    def drop(self) -> None:
        """Ends a call that nobody has begun, and frees its arguments: `result` raises EngineError."""
        del self._function
        self._error = EngineError("a call was not made, since one before it failed or was interrupted")
        self._is_made.set()

    def done(self) -> bool:
        """Returns whether `result` need not wait."""
        return self._is_made.is_set() or (self._pool is not None and self._pool.has_lost_threads)

    def result(self) -> T:
        """Waits for the call, and returns or raises what it does. Raises EngineError if a thread is lost."""
        try:
            while not self._is_made.wait(_LOOK_SECONDS):
                if self._pool is not None and self._pool.has_lost_threads:
                    raise lost(self._pool.work)
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            del self  # as there


class ThreadPool:
    """Makes calls on a few threads, in turn; where none can be started, on the caller's.

    Python starts none while the interpreter ends, and containers limit their number. Such a rank must not
    fail alone: the other ranks wait for it.

    Its end waits for the calls; after an error, for those under way, and no other is made. After an interrupt
    it waits for none: what an interrupted user waits for may be storage that hangs.

    Args:
        work: what the threads do, for the error if one is lost.
    """

    def __init__(self, most_threads: int, work: str = "asks storage") -> None:
        self._most_threads = most_threads
        self.work = work
        self._lock = threading.Lock()
        self._waiting: deque[Call[Any]] = deque()  # guarded by the lock, as the next
        self._at_work = 0  # how many threads look for a call once they have made theirs
        self._threads: list[BackgroundThread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._drop_waiting()
        if error is None or isinstance(error, Exception):
            try:
                for thread in self._threads:
                    thread.join()
            except BaseException:  # an interrupt, of this wait
                self._drop_waiting()
                raise

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Has a call made, after those that wait already."""
        call = Call(functools.partial(function, *args, **kwargs), self)
        with self._lock:
            self._waiting.append(call)
            is_full = self._at_work == self._most_threads
            self._at_work += not is_full
        try:
            if not is_full and not self._start_thread():
                self._make_calls()
            return call
        finally:
            del call  # the frames of an error would keep it, and it keeps the error

    def map(self, function: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """Returns what `function` returns for each item. Raises the first item's error, if any."""
        calls = deque([self.submit(function, item) for item in items])
        results = []
        while calls:  # as there, of each call that is asked
            results.append(calls.popleft().result())
        return results

    @property
    def has_lost_threads(self) -> bool:
        """Whether a thread is lost (BackgroundThread.is_lost), perhaps with a call."""
        return any(thread.is_lost for thread in self._threads)

    def _drop_waiting(self) -> None:
        with self._lock:
            while self._waiting:
                self._waiting.popleft().drop()

    def _start_thread(self) -> bool:
        thread = BackgroundThread(self._make_calls)
        try:
            thread.start()
        except RuntimeError:
            return False
        kept = [one for one in self._threads if one.is_lost or not one.join(0.0)]
        self._threads = [*kept, thread]
        return True

    def _make_calls(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._at_work -= 1
                    return
                call = self._waiting.popleft()
            call.make()
            del call  # as there


def _yield_to_wakers() -> None:
    """Keeps the calling thread from taking the core of a thread that wakes it (cuda/os/threads.h)."""
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
