"""Threads for work in the background of the trainer."""

from __future__ import annotations

import _thread
import contextlib
import errno
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from megatron_datastates.errors import EngineError
from megatron_datastates.pipeline.saving.flag import Flag

S = TypeVar("S")
T = TypeVar("T")
# Delay of a thread that a poll starts. After it the trainer is done with the poll and with what Megatron does
# next; an earlier thread would take the GIL from the trainer for milliseconds.
AFTER_POLL_SECONDS = 0.01
# The delay of copies that a poll starts: they would share the cores with what Megatron does after a poll (it
# ends saves that are published, with a collective call).
COPIES_AFTER_POLL_SECONDS = 0.003
AFTER_LATE_SECONDS = 0.1  # for storage whose last answer came too late
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


def in_background(function: Callable[[S], T], parts: Iterable[S]) -> list[T]:
    """Returns what `function` returns for each part; for each on a thread, or here, if none can be started.

    Not a pool of threads: the interpreter waits for those before it ends, and storage may hang.

    Raises:
        Exception: the first part's for which `function` raises one. Other parts may be under way.
    """
    asked: list[tuple[Future[T], BackgroundThread]] = []
    for part in parts:
        answer: Future[T] = Future()
        work = functools.partial(_answer, answer, functools.partial(function, part))
        asked.append((answer, BackgroundThread(work)))
        try:
            asked[-1][1].start()
        except RuntimeError:
            work()
    return [_answer_of(*one) for one in asked]


def _answer_of(answer: Future[T], thread: BackgroundThread) -> T:
    while not answer.done():
        if thread.join(_LOOK_SECONDS) and not answer.done():
            raise lost("asks storage")
    return answer.result()


def _answer(answer: Future[T], ask: Callable[[], T]) -> None:
    try:
        answer.set_result(ask())
    except BaseException as error:
        answer.set_exception(error)


class Answers:
    """Asks storage that may hang: the trainer waits for an answer for a while, and then does without.

    While one question hangs, none is asked, and none waited for. Where the last answer came too late, as each
    may from slow storage, the next one is waited for AFTER_LATE_SECONDS at most.
    """

    def __init__(self) -> None:
        self._asking: BackgroundThread | None = None  # the last one
        self._is_late = False

    def get(self, ask: Callable[[], T], seconds: float) -> T:
        """Returns what `ask` returns, which is called on a thread; or here, if no thread can be started.

        Raises:
            TimeoutError: it has not returned after `seconds`, or less (see above); or an earlier one hangs.
            Exception: what it raises.
        """
        answer: Future[T] = Future()
        if self.is_answered():
            thread = BackgroundThread(functools.partial(_answer, answer, ask))
            try:
                thread.start()
            except RuntimeError:
                return ask()
            self._asking = thread
            patience = min(seconds, AFTER_LATE_SECONDS) if self._is_late else seconds
            # In a forked child, which has no such thread, `join` returns at once.
            self._is_late = not (thread.join(patience) and answer.done())
            if not self._is_late:
                return answer.result()
        raise TimeoutError(errno.ETIMEDOUT, "no answer")

    def is_answered(self, seconds: float = 0.0) -> bool:
        """Waits until no question hangs; returns False if one still does after `seconds`."""
        return self._asking is None or self._asking.join(seconds)


def _yield_to_wakers() -> None:
    """Keeps the calling thread from taking the core of a thread that wakes it (cuda/os/threads.h)."""
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
