"""Work on threads: of which a limited part is begun ahead, or all of which stops together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import TypeVar

from megatron_datastates.convert.sinks.sink import Progress

T = TypeVar("T")


def ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """Yields items in their order, and each one only after up to `count` further ones have been made.

    Where making an item begins work on another thread, so many of them are worked on ahead.
    """
    made: deque[T] = deque()
    for item in items:
        made.append(item)
        if len(made) > count:
            yield made.popleft()
    while made:
        yield made.popleft()


class Workers:
    """Threads that all stop at their next report of progress once one has failed or the user interrupts."""

    def __init__(self, count: int, progress: Progress) -> None:
        self._count, self._progress = count, progress
        self._stop = threading.Event()

    def progress(self, bytes_done: int) -> None:
        """Reports progress. Raises CancelledError once the threads are to stop."""
        if self._stop.is_set():
            raise CancelledError
        self._progress(bytes_done)

    def run(
        self, numbers: Sequence[int], work: Callable[[int], T], on_error: Callable[[], None] = lambda: None
    ) -> list[tuple[int, T]]:
        """Calls `work` for each number, and returns (number, result) pairs.

        After the first error it calls `on_error`, waits until all threads have stopped, and raises the error.
        """
        with ThreadPoolExecutor(self._count) as pool:
            try:
                futures = [pool.submit(work, number) for number in numbers]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                return [(number, future.result()) for number, future in zip(numbers, futures, strict=True)]
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                on_error()
                raise
