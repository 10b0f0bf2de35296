"""What each save cost, for people and for machines: a log line and a JSON line, written by rank 0."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.records import RankRecord

logger = logging.getLogger(__name__)


class Reporter:
    """Brings a report to the log and to a file, on rank 0, and to listeners, on every rank.

    Args:
        path: of the file that takes a line of JSON per report; none if empty.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.listeners: list[Callable[[dict[str, Any]], None]] = []

    def is_wanted(self, rank: int) -> bool:
        """Whether anybody reads this rank's reports."""
        return rank == 0 or bool(self.listeners)

    def emit(self, report: dict[str, Any]) -> None:
        """Writes one report. Raises nothing: on one rank alone, training must not end for it."""
        if report["rank"] == 0:
            self._write(report)
        for listener in self.listeners:
            try:
                listener(report)
            except Exception as error:
                logger.warning("the report of a save did not reach %r: %s", listener, error)

    def _write(self, report: dict[str, Any]) -> None:
        logger.info(
            "datastates: %s %s of %.1f MB to %s; trainer held %.1f ms, %.1f ms of it at the fence; "
            "its stream waited %.1f ms; waited %.1f ms for slots behind %d unfinished saves; %.0f MB/s",
            report["state"],
            report["mode"] + " save",
            report["bytes"] / 1e6,
            report["directory"],
            report["held_ms"],
            report["fence_ms"],
            report["stream_wait_ms"],
            report["slot_wait_ms"],
            report["saves_before"],
            report["write_mb_per_s"],
        )
        if not self._path:
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(report) + "\n")
        except OSError as error:
            logger.warning("the report of a save was not written to %s: %s", self._path, error.strerror)


def save_report(publication: Publication, mode: str) -> dict[str, Any]:
    """One save as plain data.

    `bytes` are all ranks' data files; eager and lazy bytes are this rank's tensors. Times are milliseconds,
    on this rank (rank 0 in the log and the file) unless under `ranks_ms`. `held_ms` is host time: all of
    save_checkpoint, what follows it until the first poll (`until_poll` in `held_parts_ms`: Megatron's timers
    synchronize the device there), polls, fence and finalization. `stream_wait_ms` is how long the trainer's
    stream waited for copies, by the device's clock; a wait that is not over yet is left out.
    `slot_wait_ms` adds up what the
    copying threads waited for a free slot: behind the `saves_before` that were not finished when this one
    started, and for its own writes where the pool is smaller than the shard. `memory_wait_ms` is the part
    of it in which the pool was still being made: this save came before its memory.
    """
    save = publication.save
    times = save.times()
    data = sum(record.file_bytes for record in publication.records)
    slowest = max((record.writing for record in publication.records), default=0.0)
    return {
        "event": "save",
        "save_id": str(save.context.save_id),
        "directory": str(save.context.directory),
        "iteration": save.context.iteration,
        "mode": mode,
        "rank": save.context.rank,
        "state": "published" if publication.outcome is Outcome.PUBLISHED else "failed",
        "error": publication.error,
        "ranks": save.context.world_size,
        "bytes": data,
        "eager_bytes": save.eager_bytes,
        "lazy_bytes": save.lazy_bytes,
        "held_ms": _ms(save.held.total),
        "held_parts_ms": {part: _ms(seconds) for part, seconds in save.held.parts.items()},
        "fence_ms": _ms(save.fence_seconds),
        "stream_wait_ms": _ms(times["stream_wait"]),
        "staging_ms": _ms(times["staging"]),
        "serializing_ms": _ms(times["serializing"]),
        "writing_ms": _ms(times["writing"]),
        "durable_ms": _ms(times["durable"]),
        "saves_before": save.saves_before,
        "slot_wait_ms": _ms(times["slot_wait"]),
        "memory_wait_ms": _ms(times["memory_wait"]),
        "write_mb_per_s": round(data / slowest / 1e6, 1) if slowest > 0 else 0.0,
        "ranks_ms": _rank_statistics(publication.records),
    }


def _rank_statistics(records: Sequence[RankRecord]) -> dict[str, dict[str, float]]:
    found = {}
    for name in ("held", "fence", "stream_wait", "staging", "writing", "durable"):
        values = [getattr(record, name) for record in records]
        if values:
            found[name] = {
                "min": _ms(min(values)),
                "median": _ms(statistics.median(values)),
                "max": _ms(max(values)),
                "slowest_rank": records[values.index(max(values))].rank,
            }
    return found


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
