"""Flags whose setters and waiters are interrupted anywhere. A call that must not hang is made on a thread."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_datastates import flag as flags
from megatron_datastates.flag import Flag
from tests.support.programs import Programs
from tests.support.waiting import eventually

LIMIT_SECONDS = 10.0


class Interrupt(BaseException):
    pass


def in_time(function: Callable[[], object]) -> Any:
    """Returns what the function returns; fails if it hangs."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive(), "the call hangs"
    (result,) = results
    return result


def acts_within(function: Callable[[], object], number: int, act: Callable[[], object]) -> bool:
    """Calls `function`, and `act` before its bytecode of that number, from 1 on; returns whether it has one.

    An Interrupt that `act` raises ends the call, as a signal handler's would.
    """
    left = number

    def trace(frame: types.FrameType, event: str, arg: object) -> Callable[..., Any]:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                act()
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for such a frame when tracing begins
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except Interrupt:
        pass
    finally:
        sys.settrace(before)
    return left <= 0


def interrupt() -> None:
    raise Interrupt


def waiting(flag: Flag, count: int) -> list[threading.Thread]:
    """Returns threads that wait for a flag."""
    threads = [threading.Thread(target=flag.wait, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(flag._waiters) == count)
    return threads


def assert_released(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "_SLICE_SECONDS", 0.02)


def each_bytecode(attempt: Callable[[int], bool]) -> Iterator[int]:
    """Yields 1, 2 and so on after each attempt with that number, as long as attempts are successful."""
    number = 1
    while attempt(number):
        yield number
        number += 1


def test_a_flag_is_set_once_and_for_all() -> None:
    flag = Flag()
    assert not flag.is_set() and not flag.wait(0.0) and not flag.wait(-1.0) and not flag.wait(0.01)
    threads = waiting(flag, 3)
    flag.set()
    flag.set()
    assert_released(threads)
    assert flag.is_set() and flag.wait() and flag.wait(0.0) and flag.wait(float("inf"))
    assert not flag._waiters


def test_a_wait_ends_in_its_time_and_not_before() -> None:
    flag, begin = Flag(), time.monotonic()
    assert not flag.wait(0.07)
    assert 0.07 <= time.monotonic() - begin < LIMIT_SECONDS
    assert not flag._waiters


def test_waiters_are_released_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "_SLICE_SECONDS", 1000.0)
    flag = Flag()
    threads = waiting(flag, 2)
    flag.set()
    assert_released(threads)


def test_threads_that_set_and_wait_at_the_same_time_miss_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "_SLICE_SECONDS", 1000.0)
    for _ in range(300):
        flag, start = Flag(), threading.Barrier(4)

        def run(act: Callable[[], object], start: threading.Barrier = start) -> None:
            start.wait()
            act()

        acts = (flag.wait, flag.wait, flag.set, flag.set)
        threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
        for thread in threads:
            thread.start()
        assert_released(threads)


def test_a_set_that_is_interrupted_anywhere_hangs_nobody() -> None:
    """Neither who waits already, if it was set, nor who sets it again, as error handlers do."""

    def attempt(number: int) -> bool:
        flag = Flag()
        threads = waiting(flag, 2)
        was_interrupted = in_time(lambda: acts_within(flag.set, number, interrupt))
        if flag.is_set():
            assert_released(threads)
            assert in_time(flag.wait)
        else:
            assert not in_time(lambda: flag.wait(0.001))
        in_time(flag.set)
        assert_released(threads)
        return bool(was_interrupted)

    assert len(list(each_bytecode(attempt))) > 10


@pytest.mark.parametrize("is_set_meanwhile", [False, True])
def test_a_wait_that_is_interrupted_anywhere_hangs_nobody(is_set_meanwhile: bool) -> None:
    def attempt(number: int) -> bool:
        flag = Flag()
        setter = threading.Timer(0.01, flag.set)
        if is_set_meanwhile:
            setter.start()
        seconds = LIMIT_SECONDS if is_set_meanwhile else 0.03  # more than one slice
        was_interrupted = in_time(lambda: acts_within(lambda: flag.wait(seconds), number, interrupt))
        if not is_set_meanwhile:
            assert not in_time(lambda: flag.wait(0.001))
            in_time(flag.set)
        assert in_time(flag.wait)
        if is_set_meanwhile:
            setter.join(LIMIT_SECONDS)
            assert not setter.is_alive()
        assert len(flag._waiters) <= 1, "one, if its removal was interrupted"
        return bool(was_interrupted)

    assert len(list(each_bytecode(attempt))) > 10


@pytest.mark.parametrize("name", ["set", "wait"])
def test_a_handler_may_set_and_wait_in_the_middle_of_either(name: str) -> None:
    def attempt(number: int) -> bool:
        flag = Flag()

        def handle() -> None:
            assert not flag.wait(0.001) or name == "set"
            flag.set()
            assert flag.wait()

        has_handled = in_time(lambda: acts_within(getattr(flag, name), number, handle))
        assert flag.is_set()
        return bool(has_handled)

    # A wait that nobody sets the flag for has no end: as many bytecodes as it has before it waits.
    if name == "wait":
        assert all(attempt(number) for number in range(1, 30))
    else:
        assert len(list(each_bytecode(attempt))) > 5


def test_a_signal_ends_a_wait() -> None:
    def handle(number: int, frame: object) -> None:
        raise Interrupt

    flag, before = Flag(), signal.signal(signal.SIGUSR1, handle)
    sender = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    sender.start()
    try:
        with pytest.raises(Interrupt):
            flag.wait(LIMIT_SECONDS)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert not flag._waiters
    in_time(flag.set)
    assert flag.wait()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_child_that_is_forked_in_the_middle_of_a_set_may_use_the_flag() -> None:
    def fork(flag: Flag, children: list[int]) -> None:
        child = os.fork()
        if child == 0:  # no thread of the parent's goes on here
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(LIMIT_SECONDS))  # ends it, if it hangs
            flag.set()
            os._exit(0 if flag.wait() else 1)
        children.append(child)

    def attempt(number: int) -> bool:
        flag, children = Flag(), list[int]()
        threads = waiting(flag, 1)
        has_forked = in_time(lambda: acts_within(flag.set, number, lambda: fork(flag, children)))
        assert_released(threads)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
        return bool(has_forked)

    assert len(list(each_bytecode(attempt))) > 10


def test_a_program_that_is_interrupted_in_a_save_goes_on(programs: Programs, tmp_path: Path) -> None:
    ended = programs.run(["-m", "tests.support.interrupted", tmp_path])
    assert ended.returncode == 0, ended.stderr
    places = ended.stdout.split()
    assert {"postponement.py:end", "rank_save.py:_confirm", "tail.py:wait_read"} <= set(places)
