"""Reports of saves and loads: on rank 0 a line in the log and a line of JSON in a file.

The fields are listed in docs/reports.md. What a load cost is measured in load_report.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import BuiltinMethodType, MethodType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_datastates.errors import OptionError
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.saving.background import AFTER_POLL_SECONDS
from megatron_datastates.pipeline.saving.provider_costs import provider_costs
from megatron_datastates.threads import BackgroundThread
from megatron_datastates.units import milliseconds

logger = logging.getLogger(__name__)
_PATIENCE_SECONDS = 5.0  # for a file that hangs, once


Report = dict[str, Any]


class Listener(NamedTuple):
    """What is called with reports on the trainer's thread."""

    callback: Callable[[Report], object]
    is_listening: Callable[[], bool] = lambda: True  # making a report for nobody costs the trainer time

    def __eq__(self, other: object) -> bool:
        """Returns whether both call the same, and not what only has equal values, as dataclasses have.

        A method is another object each time that it is looked up; two are equal if they are of one object.
        """
        if not isinstance(other, Listener):
            return False
        is_method = isinstance(self.callback, (MethodType, BuiltinMethodType))
        return self.callback is other.callback or (is_method and self.callback == other.callback)


# Of the program, for all saves and loads, whatever their options. Changed by atomic operations only.
_of_program: list[Listener] = []
_failed: list[Listener] = []  # those whose error was logged, once: others may follow in every save


def on_report(callback: Callable[[Report], object]) -> Callable[[], None]:
    """Has `callback` called with the report of each save and each load of this process, from now on.

    A report is a dictionary of its own, with the fields of docs/reports.md: those of a line of the report
    file. Saves that failed or were skipped, and loads that failed, are reported, too; what near tiers do
    besides is not. Every rank that takes part in a save or a load calls its own callbacks; of a save by
    PyTorch's distributed checkpoints, only the coordinator does.

    The trainer waits for the callback, on its own thread (DCP's thread in `dcp.async_save`): whatever may
    take long belongs into a queue. It makes no collective calls, as ranks may call it at different times.
    What it raises is logged, once, and harms no save and no load.

    Args:
        callback: may be registered before Megatron or any save has begun. Registered again, it is still
            called once for each report.

    Returns:
        A function that ends it.

    Raises:
        OptionError: `callback` cannot be called.
    """
    if not callable(callback):
        raise OptionError(f"expected a function that takes a report, found {callback!r}")
    listener = Listener(callback)
    if listener not in _of_program:
        _of_program.append(listener)

    def end() -> None:
        for listeners in (_of_program, _failed):
            with contextlib.suppress(ValueError):  # ended before, or never failed
                listeners.remove(listener)

    return end


class Reporter:
    """Writes reports to the log and to a file, on rank 0, and passes them to listeners, on every rank.

    Args:
        path: the file that gets one line of JSON per report; no file if empty.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # Those that may not have ended; each follows the ones before it. Changed by atomic operations only:
        # programs may save on several threads.
        self._writers: list[BackgroundThread] = []
        self._hangs = False
        self.listeners: list[Listener] = []

    def emit(self, rank: int, make: Callable[[], Report], *, later: bool = False) -> None:
        """Makes and writes one report. Never raises: an error of one rank here must not end training.

        Args:
            make: makes the report of this rank, on any thread; not called if nobody wants it.
            later: the trainer does not wait for the thread that writes it, because it is in a poll: the file
                may be on slow storage, and statistics of thousands of ranks take milliseconds.
        """
        listeners = [listener for listener in (*self.listeners, *_of_program) if _is_listening(listener)]
        if listeners:
            report = make()
            make = functools.partial(dict, report)
        if rank == 0:
            self._write_on_thread(make, AFTER_POLL_SECONDS if later else 0.0)
            if not later:
                self._await_file()
        for listener in listeners:
            if listener in self.listeners or listener in _of_program:  # another one may have ended it
                _call(listener, report)

    def flush(self, seconds: float | None = None) -> bool:
        """Waits until all reports are written; returns False if they are not after `seconds`."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        return all(one.join(deadline - time.monotonic()) for one in tuple(self._writers))

    def _await_file(self) -> None:
        """Waits until all reports are written, but not forever: all ranks would wait for this one."""
        hangs = not self.flush(0.0 if self._hangs else _PATIENCE_SECONDS)
        if hangs and not self._hangs:
            logger.warning("%s hangs: the last reports are not written yet", self._path or "the log")
        self._hangs = hangs

    def _write_on_thread(self, make: Callable[[], Report], delay: float) -> None:
        makers, before = [make], tuple(self._writers)

        def write() -> None:
            report = makers.pop()()  # first: what it refers to is not kept while the file hangs
            for one in before:
                one.join()
            self.write(report)

        writer = BackgroundThread(write, delay=delay)
        try:
            writer.start()
            self._writers.append(writer)
        except RuntimeError:  # no thread can be started
            if self.flush(_PATIENCE_SECONDS):
                write()
        for one in before:
            if one.join(0.0):
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._writers.remove(one)

    def write_later(self, report: Report) -> None:
        """Writes one report to log and file only. Waits for neither, on any thread. Never raises."""
        self._write_on_thread(lambda: report, AFTER_POLL_SECONDS)

    def write(self, report: Report) -> None:
        """Writes one report to log and file only, on any thread: listeners are the trainer's."""
        if report["event"] in _LINES:
            logger.info("%s", _LINES[report["event"]](report))
        if not self._path:
            return
        try:
            with open(self._path, "ab", buffering=0) as file:  # in one piece, between those of other threads
                # As text what JSON lacks, such as an iteration for which the save has failed.
                line = json.dumps(report, default=str).encode() + b"\n"
                while line:  # a file system that is nearly full takes the beginning; the rest gets its error
                    line = line[file.write(line) :]
        except OSError as error:
            logger.warning(
                "the report of a %s was not written to %s: %s", report["event"], self._path, error.strerror
            )


def _is_listening(listener: Listener) -> bool:
    try:
        return listener.is_listening()
    except Exception as error:
        logger.warning("the listener %r raised when it was asked for: %s", listener.callback, error)
        return False


def _copy_of(value: Any) -> Any:
    """Returns dictionaries and lists, and those in them, anew. All else is as it was: it may be anything."""
    if isinstance(value, dict):
        return {name: _copy_of(each) for name, each in value.items()}
    return [_copy_of(each) for each in value] if isinstance(value, list) else value


def _call(listener: Listener, report: Report) -> None:
    try:
        listener.callback(_copy_of(report))  # which it may change
    except Exception as error:
        if listener not in _failed:
            _failed.append(listener)
            logger.warning(
                "the listener %r raised for the report of a %s: %s. Its later errors are not logged",
                listener.callback,
                report["event"],
                error,
            )


def _save_line(report: Report) -> str:
    linked = f" ({report['linked_bytes'] / 1e6:.1f} MB of it linked)" if report["linked_bytes"] else ""
    where = f"{report['directory']}{' (so far in near tiers)' * report['near']}"
    return (
        f"datastates: {report['state']} {report['mode']} save of {report['bytes'] / 1e6:.1f} MB{linked} to "
        f"{where}; trainer held {report['held_ms']:.1f} ms, {report['fence_ms']:.1f} ms of it "
        f"at the fence; the CUDA stream waited {report['stream_wait_ms']:.1f} ms; waited "
        f"{report['slot_wait_ms']:.1f} ms for slots, with {report['saves_before']} unfinished saves before; "
        f"{report['write_mb_per_s']:.0f} MB/s"
    )


def _load_line(report: Report) -> str:
    what = "loaded" if report["state"] == "loaded" else f"{report['state']} load of"
    result = f"{what} {report['bytes'] / 1e6:.1f} MB from {report['directory']}"
    longest = ""
    if "ranks_ms" in report:
        part, spread = max(report["ranks_ms"].items(), key=lambda one: one[1]["max"])
        longest = f"; longest of all ranks: {part} on rank {spread['slowest_rank']}, {spread['max']:.1f} ms"
    return (
        f"datastates: {result} in {report['total_ms']:.1f} ms; opening {report['opening_ms']:.1f} ms, "
        f"planning {report['planning_ms']:.1f} ms, reading {report['bytes_read'] / 1e6:.1f} MB in "
        f"{report['reading_ms']:.1f} ms; {report['read_mb_per_s']:.0f} MB/s{longest}"
    )


def _drain_line(report: Report) -> str:
    return (
        f"datastates: copied {report['bytes'] / 1e6:.1f} MB from near tiers to {report['directory']}, "
        f"{report['near_ms']:.1f} ms after it was published near; this node copied "
        f"{report['node_bytes'] / 1e6:.1f} MB at {report['node_mb_per_s']:.0f} MB/s"
    )


def _copies_line(report: Report) -> str:
    error = f"; copies are missing: {report['error']}" if report["error"] else ""
    return (
        f"datastates: copied {report['bytes'] / 1e6:.1f} MB of {report['directory']} from "
        f"{', '.join(report['partners']) or 'no node'} to this node's near tier in "
        f"{report['copying_ms']:.1f} ms{error}"
    )


_LINES = {"save": _save_line, "load": _load_line, "drain": _drain_line, "copies": _copies_line}


def skip_report(iteration: int, unfinished: Path) -> Report:
    """Returns the report of a save that is left out, because the one to `unfinished` is not over.

    It is for the file only: the log has a warning.
    """
    return {
        "event": "skip",
        "iteration": iteration,
        "unfinished": str(unfinished),
        "skipped_at": round(time.time(), 3),
    }


def save_report(publication: Publication, mode: str) -> dict[str, Any]:
    """Returns the report of one save on this rank; docs/reports.md lists the fields."""
    save = publication.save
    times = save.times()
    records = publication.records.columns
    stable = records["stable_file_bytes"]
    data = int(records["file_bytes"].sum() + stable.sum())
    linked = int(stable[records["stable_ordinal"] != save.context.save_id.ordinal].sum())
    slowest = float(records["writing"].max(initial=0.0))
    return {
        "event": "save",
        "save_id": str(save.context.save_id),
        "directory": str(save.context.directory),
        "iteration": save.context.iteration,
        "started_at": round(time.time() - (time.perf_counter() - save.started_at), 3),
        "mode": mode,
        "rank": save.context.rank,
        "state": "published" if publication.outcome is Outcome.PUBLISHED else "failed",
        "error": publication.error,
        "near": publication.outcome is Outcome.PUBLISHED and bool(records["is_near"].any()),
        "ranks": save.context.world_size,
        "bytes": data,
        "written_bytes": data - linked,
        "linked_bytes": linked,
        "eager_bytes": save.plan.eager_bytes if save.plan is not None else 0,
        "lazy_bytes": save.plan.lazy_bytes if save.plan is not None else 0,
        "providers": provider_costs(save.plan, save.tail.by_provider, save.tail.costs),
        "held_ms": milliseconds(save.held.total),
        # Of a copy: the trainer may add a part now, as a call that waits for a save that is over does.
        "held_parts_ms": {part: milliseconds(seconds) for part, seconds in dict(save.held.parts).items()},
        "held_spans_ms": [
            [part, milliseconds(begin - save.started_at), milliseconds(end - save.started_at)]
            for part, begin, end in save.held.spans
        ],
        "fence_ms": milliseconds(save.fence_seconds),
        "stream_wait_ms": milliseconds(times["stream_wait"]),
        "staging_ms": milliseconds(times["staging"]),
        "serializing_ms": milliseconds(times["serializing"]),
        "writing_ms": milliseconds(times["writing"]),
        "confirmed_ms": None
        if save.confirmed_at is None
        else milliseconds(save.confirmed_at - save.started_at),
        "durable_ms": milliseconds(times["durable"]),
        "published_ms": None
        if publication.publisher.published_at is None
        else milliseconds(publication.publisher.published_at - save.started_at),
        "prepared": publication.is_prepared if publication.is_of_training else None,
        "not_prepared_because": publication.not_prepared_because or None,
        "saves_before": save.saves_before,
        "slot_wait_ms": milliseconds(times["slot_wait"]),
        "memory_wait_ms": milliseconds(times["memory_wait"]),
        "write_mb_per_s": round((data - linked) / slowest / 1e6, 1) if slowest > 0 else 0.0,
        "ranks_ms": _rank_statistics(records),
    }


def _rank_statistics(records: npt.NDArray[np.void]) -> dict[str, dict[str, float]]:
    statistics: dict[str, dict[str, float]] = {}
    for name in ("held", "fence", "stream_wait", "staging", "writing", "durable", "slot_wait"):
        values = records[name]
        if len(values):
            statistics[name] = {
                "min": milliseconds(float(values.min())),
                "median": milliseconds(float(np.median(values))),
                "max": milliseconds(float(values.max())),
                "slowest_rank": int(records["rank"][values.argmax()]),
            }
    return statistics
