"""The threads of a conversion stop together, whenever it is interrupted."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_datastates.convert import workers
from megatron_datastates.convert.workers import Workers
from tests.support.bytecodes import interrupted

LIMIT_SECONDS = 20.0


def test_an_interrupt_at_any_moment_stops_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the starts of two threads: the end of the pool would wait for the first one."""
    for number in itertools.count(1):
        stopped, unstopped = threading.Event(), list[int]()

        def wait(futures: Sequence[Any], stopped: threading.Event = stopped, **how: Any) -> Any:
            stopped.set()  # all threads were started: let them end
            return concurrent.futures.wait(futures, **how)

        def work(number: int, stopped: threading.Event = stopped, unstopped: list[int] = unstopped) -> None:
            if not stopped.wait(LIMIT_SECONDS):
                unstopped.append(number)

        def run(stopped: threading.Event = stopped, work: Any = work) -> None:
            Workers(2, lambda count: None).run(range(3), work, stopped.set)

        monkeypatch.setattr(workers, "wait", wait)
        was_interrupted = interrupted(run, workers.__file__, number)
        assert not unstopped, f"interrupted before bytecode {number}"
        if not was_interrupted:
            break
    assert number > 50
