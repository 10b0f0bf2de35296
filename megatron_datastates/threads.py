"""A pool of threads that also works where no thread can be started."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class ThreadPool(ThreadPoolExecutor):
    """Makes calls on the caller's thread where no thread can be started.

    Python starts none while the interpreter ends, and containers limit their number. Such a rank must not
    fail alone: the other ranks wait for it.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        call = _Call(functools.partial(fn, *args, **kwargs), future)
        try:
            if not self._queue(call):
                call()
            return future
        finally:
            del future  # the frames of an error would keep it, and it keeps the error

    def _queue(self, call: Callable[[], None]) -> bool:
        """Returns False if no thread could be started; threads that run may make the call all the same."""
        try:
            super().submit(call)
        except RuntimeError:
            return False
        return True


class _Call:
    """Makes a call for a future, once, whichever threads try to. Then the pool's queue may keep it."""

    def __init__(self, function: Callable[[], Any], future: Future[Any]) -> None:
        self._function, self._future, self._turn = function, future, threading.Lock()

    def __call__(self) -> None:
        if not self._turn.acquire(blocking=False) or not self._future.set_running_or_notify_cancel():
            return
        function = self._function
        del self._function  # and its arguments
        try:
            result = function()
        except BaseException as error:
            self._future.set_exception(error)
            del self._future  # as there
        else:
            self._future.set_result(result)
