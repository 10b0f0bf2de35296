"""Reads the lines of JSON that `--datastates-report-file` makes; docs/reports.md lists their fields.

A file may hold several runs, a line that a killed run left incomplete, and the first line of the next run on
the same line. What cannot be read is skipped and noted; a file without any report is an error.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from megatron_datastates.errors import StorageError, UnsupportedFormatError

_BEGIN = '{"event": '  # of every line, as pipeline/report.py writes it
_MOST_NOTES = 5  # for each file; a damaged one may have thousands
_INCOMPLETE = "it is not a whole line of JSON"
_WRITTEN_BY = "expected the lines of JSON that --datastates-report-file writes"
_MOST_BYTES = 1 << 30  # of a file, which is read whole
# JSON may have integers of thousands of digits, and Python's has Infinity and NaN.
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)]
Number = Annotated[float, msgspec.Meta(gt=-1e300, lt=1e300)]


class Spread(msgspec.Struct, frozen=True, rename={"least": "min", "most": "max"}):
    """One time over all ranks, in milliseconds."""

    least: Number
    median: Number
    most: Number
    slowest_rank: Whole


class Copies(msgspec.Struct, frozen=True, tag_field="event", tag="copies"):
    """The copies of other nodes' files that one rank made in its node's near tier, for one save."""

    save_id: str
    error: str | None
    started_at: Number  # seconds since 1970
    copying_ms: Number
    partners: Sequence[str]  # names of the nodes that they came from
    bytes: Whole


class Save(msgspec.Struct, frozen=True, tag_field="event", tag="save", rename={"spreads": "ranks_ms"}):
    """One save, as the lowest rank that reported it saw it. Times in milliseconds count from its start."""

    save_id: str
    rank: Whole
    ranks: Whole
    iteration: Whole | None
    mode: str
    state: str
    error: str | None
    bytes: Whole
    written_bytes: Whole
    eager_bytes: Whole
    lazy_bytes: Whole
    held_ms: Number
    fence_ms: Number
    stream_wait_ms: Number
    staging_ms: Number
    serializing_ms: Number
    writing_ms: Number
    durable_ms: Number
    slot_wait_ms: Number
    memory_wait_ms: Number
    saves_before: Whole
    write_mb_per_s: Number
    held_parts_ms: Mapping[str, Number]
    providers: Mapping[str, Mapping[str, Number]]
    spreads: Mapping[str, Spread]
    held_spans_ms: Sequence[tuple[str, Number, Number]]
    started_at: Number  # seconds since 1970
    published_ms: Number | None  # None: it was not
    near: bool = False  # whether it was published in the near tiers only, at first
    staging_bytes: Whole = 0
    page_locked_bytes: Whole = 0
    staging_trouble: str = ""
    confirmed_ms: Number | None = None  # until its footer could be written; None: not reported
    prepared: bool | None = None  # whether it reused what the last one had prepared; None: no save there can
    not_prepared_because: str | None = None  # None also if the reason is not known
    far_ms: Number | None = None  # until it was published in --save, if a near tier had it first
    copies: Copies | None = None  # what the reporting rank copied from other nodes to its near tier

    @property
    def run(self) -> str:
        """Returns which process group saved: all saves between two starts of a program have one."""
        return self.save_id.partition("-")[0]

    @property
    def ordinal(self) -> int:
        """Returns the count of the save in its run, 0 if its id has none."""
        count = self.save_id.partition("-")[2]
        return int(count) if count.isdecimal() and len(count) < 20 else 0

    @property
    def failed(self) -> bool:
        return self.state != "published"

    @property
    def name(self) -> str:
        """Returns the iteration, or the save id where the program named none."""
        return self.save_id if self.iteration is None else str(self.iteration)

    @property
    def title(self) -> str:
        """Returns its name with what that is, as in `iteration 50`."""
        return f"{'save' if self.iteration is None else 'iteration'} {self.name}"

    @property
    def label(self) -> str:
        """Returns its name for an axis: for a save id, which is too long, its number in the run."""
        return f"#{self.ordinal}" if self.iteration is None else self.name

    @property
    def copies_ms(self) -> tuple[float, float] | None:
        """Returns when copies on other nodes were begun and made, if there are any."""
        if self.copies is None:
            return None
        begin = max((self.copies.started_at - self.started_at) * 1000, 0.0)
        return begin, begin + self.copies.copying_ms

    def slowest_ms(self, name: str) -> float:
        """Returns the longest `staging`, `writing` or `durable` of all ranks, in milliseconds."""
        own = float(getattr(self, f"{name}_ms"))
        return self.spreads[name].most if name in self.spreads else own

    @property
    def disk_ms(self) -> float:
        """Returns the slowest rank's time to durable, without the wait to be confirmed if that is known."""
        durable = self.slowest_ms("durable")
        if self.confirmed_ms is None:
            return durable
        written = self.slowest_ms("writing")
        return written + max(durable - max(written, self.confirmed_ms), 0.0)


class Longest(msgspec.Struct, frozen=True, rename={"most": "max"}):
    """The longest time of a rank, in milliseconds."""

    most: Number
    slowest_rank: Whole


class Load(msgspec.Struct, frozen=True, tag_field="event", tag="load", rename={"longest": "ranks_ms"}):
    """One load."""

    iteration: Whole | None
    state: str
    error: str | None
    total_ms: Number
    longest: Mapping[str, Longest] = {}  # by part; empty where ranks load without each other


class Drain(msgspec.Struct, frozen=True, tag_field="event", tag="drain"):
    """One save that was brought from the near tiers to its directory."""

    save_id: str
    near_ms: Number  # from when it was published near until it was published there


class Skip(msgspec.Struct, frozen=True, tag_field="event", tag="skip"):
    """One save that `--datastates-while-saving skip` left out."""

    iteration: Whole
    skipped_at: Number  # seconds since 1970


@dataclasses.dataclass
class Reports:
    """All reports of some files, in the order in which they began, and notes on lines that were not read."""

    saves: list[Save]
    loads: list[Load]
    skips: list[Skip]  # without those whose save was made after all
    notes: list[str]


def read_reports(paths: Iterable[Path]) -> Reports:
    """Reads report files; of several lines on one save, that of the lowest rank counts.

    Raises:
        StorageError: a file cannot be read.
        UnsupportedFormatError: a file holds no report, or none of the files has a save.
    """
    saves: dict[str, Save] = {}
    drains: dict[str, Drain] = {}
    copies: dict[str, Copies] = {}
    found = Reports([], [], [], [])
    for path in paths:
        for report in _reports(path, found.notes):
            if isinstance(report, Load):
                found.loads.append(report)
            elif isinstance(report, Skip):
                found.skips.append(report)
            elif isinstance(report, Drain):
                drains[report.save_id] = report
            elif isinstance(report, Copies):
                copies[report.save_id] = report
            elif report.save_id not in saves or report.rank < saves[report.save_id].rank:
                saves[report.save_id] = report
    found.saves = [
        msgspec.structs.replace(_with_drain(save, drains.get(save.save_id)), copies=copies.get(save.save_id))
        for save in saves.values()
    ]
    if not found.saves:
        others = {"load": found.loads, "skip": found.skips, "drain": drains, "copies": copies}
        kinds = ", ".join(name for name, lines in others.items() if lines)
        raise UnsupportedFormatError(
            f"there is no report of a save in these files, only of other events: {kinds}"
        )
    found.saves = _ordered(found.saves)
    # A run makes its last save after all, and a later run may reach the same iteration.
    made = {save.iteration: save.started_at for save in sorted(found.saves, key=lambda save: save.started_at)}
    left_out = [skip for skip in found.skips if made.get(skip.iteration, -math.inf) < skip.skipped_at]
    found.skips = sorted(left_out, key=lambda skip: skip.skipped_at)
    return found


def _ordered(saves: Iterable[Save]) -> list[Save]:
    """Returns runs by when they began, and the saves of a run as it counted them: a clock may be set back."""
    runs: dict[str, list[Save]] = {}
    for save in saves:
        runs.setdefault(save.run, []).append(save)
    counted = [sorted(run, key=lambda save: (save.ordinal, save.started_at)) for run in runs.values()]
    return list(itertools.chain(*sorted(counted, key=lambda run: run[0].started_at)))


def _with_drain(save: Save, drain: Drain | None) -> Save:
    if drain is None or save.published_ms is None:
        return save
    return msgspec.structs.replace(save, far_ms=save.published_ms + drain.near_ms)


def _reports(path: Path, notes: list[str]) -> list[Save | Load | Skip | Drain | Copies]:
    try:
        with open(path, "rb") as file:  # a pipe will do
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_MOST_BYTES} bytes")
        text = data.decode(errors="replace").replace("\r\n", "\n")
    except OSError as error:
        text = f"{path}: {error.strerror}: give a file that --datastates-report-file has written"
        raise StorageError.of(error, path, text) from None
    found: list[Save | Load | Skip | Drain | Copies] = []
    skipped: list[str] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            found += [_report(_value(line))] if line.strip() else []
        except ValueError as error:
            reason = str(error)
            if number == len(lines) and reason == _INCOMPLETE:
                reason = "it is incomplete, as a run leaves it that is killed while it writes"
            skipped.append(f"{path}, line {number} was skipped: {reason}")
    if not found:
        reason = skipped[0] if skipped else f"{path} is empty"
        raise UnsupportedFormatError(f"{path} holds no report: {_WRITTEN_BY}, found: {reason}")
    notes += skipped[:_MOST_NOTES]
    if len(skipped) > _MOST_NOTES:
        notes.append(f"{path}: {len(skipped) - _MOST_NOTES} more lines were skipped")
    return found


def _value(line: str) -> Any:
    """Returns the value of a line, or of its end if an incomplete line precedes it. Raises ValueError.

    Not by msgspec, which refuses the half surrogate pairs that names of files may have.
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        if (begin := line.rfind(_BEGIN)) > 0:
            return _value(line[begin:])
        raise ValueError(_INCOMPLETE) from None


def _report(value: Any) -> Save | Load | Skip | Drain | Copies:
    try:
        return msgspec.convert(value, Save | Load | Skip | Drain | Copies)
    except msgspec.ValidationError as error:
        field = re.search(r"`\$\.(\w+)", str(error))
        found = f", found {reprlib.repr(value[field[1]])}" if field else ""
        raise ValueError(f"it is JSON, but no valid report of a save or a load: {error}{found}") from None
