"""Reads the lines of JSON that `--datastates-report-file` makes; docs/reports.md lists their fields.

A file may hold several runs, a line that a killed run left incomplete, and the first line of the next run on
the same line. What cannot be read is skipped and noted; a file without any report is an error.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_datastates.errors import StorageError, UnsupportedFormatError

_BEGIN = '{"event": '  # of every line, as pipeline/report.py writes it
_MOST_NOTES = 5  # for each file; a damaged one may have thousands
_INCOMPLETE = "it is not a whole line of JSON"
_WRITTEN_BY = "expected the lines of JSON that --datastates-report-file writes"
_MOST_BYTES = 1 << 30  # of a file, which is read whole


@dataclasses.dataclass(frozen=True)
class Spread:
    """One time over all ranks, in milliseconds."""

    least: float
    median: float
    most: float
    slowest_rank: int


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of other nodes' files that one rank made in its node's near tier, for one save."""

    save_id: str
    state: str
    error: str | None
    started_at: float  # seconds since 1970
    copying_ms: float
    partners: Sequence[str]  # names of the nodes that they came from
    bytes: int


@dataclasses.dataclass(frozen=True)
class Save:
    """One save, as the lowest rank that reported it saw it. Times in milliseconds count from its start."""

    save_id: str
    rank: int
    ranks: int
    iteration: int | None
    mode: str
    state: str
    error: str | None
    bytes: int
    written_bytes: int
    eager_bytes: int
    lazy_bytes: int
    held_ms: float
    fence_ms: float
    stream_wait_ms: float
    staging_ms: float
    serializing_ms: float
    writing_ms: float
    durable_ms: float
    slot_wait_ms: float
    memory_wait_ms: float
    saves_before: int
    write_mb_per_s: float
    held_parts_ms: Mapping[str, float]
    providers: Mapping[str, Mapping[str, float]]
    spreads: Mapping[str, Spread]
    held_spans_ms: Sequence[tuple[str, float, float]]
    started_at: float  # seconds since 1970
    published_ms: float | None  # None: it was not
    staging_bytes: int = 0
    page_locked_bytes: int = 0
    staging_trouble: str = ""
    confirmed_ms: float | None = None  # until its footer could be written; None: not reported
    prepared: bool | None = None  # whether it reused what the last save had prepared
    not_prepared_because: str | None = None  # None also if the reason is not known
    far_ms: float | None = None  # until it was published in --save, if a near tier had it first
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


@dataclasses.dataclass(frozen=True)
class Load:
    """One load."""

    iteration: int | None
    state: str
    error: str | None
    bytes: int
    total_ms: float


@dataclasses.dataclass(frozen=True)
class Drain:
    """One save that was brought from the near tiers to its directory."""

    save_id: str
    iteration: int | None
    bytes: int
    near_ms: float  # from when it was published near until it was published there


@dataclasses.dataclass
class Reports:
    """All reports of some files, saves in the order in which they began, and notes on what was skipped."""

    saves: list[Save]
    loads: list[Load]
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
    found = Reports([], [], [])
    for path in paths:
        for report in _reports(path, found.notes):
            if isinstance(report, Load):
                found.loads.append(report)
            elif isinstance(report, Drain):
                drains[report.save_id] = report
            elif isinstance(report, Copies):
                copies[report.save_id] = report
            elif report.save_id not in saves or report.rank < saves[report.save_id].rank:
                saves[report.save_id] = report
    found.saves = [
        dataclasses.replace(_with_drain(save, drains.get(save.save_id)), copies=copies.get(save.save_id))
        for save in saves.values()
    ]
    if not found.saves:
        others = {"load": found.loads, "drain": drains, "copies": copies}
        kinds = ", ".join(name for name, lines in others.items() if lines)
        raise UnsupportedFormatError(
            f"there is no report of a save in these files, only of other events: {kinds}"
        )
    found.saves = _ordered(found.saves)
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
    return dataclasses.replace(save, far_ms=save.published_ms + drain.near_ms)


def _reports(path: Path, notes: list[str]) -> list[Save | Load | Drain | Copies]:
    try:
        with open(path, "rb") as file:  # a pipe will do
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_MOST_BYTES} bytes")
        text = data.decode(errors="replace").replace("\r\n", "\n")
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror}: give a file that --datastates-report-file has written",
            code=error.errno or 0,
            path=str(path),
        ) from None
    found: list[Save | Load | Drain | Copies] = []
    skipped: list[str] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            found += [_report(value) for value in _values(line)]
        except (ValueError, OverflowError) as error:
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


def _values(line: str) -> list[Any]:
    """Returns the value of a line, or of its end if an incomplete line precedes it. Raises ValueError."""
    if not line.strip():
        return []
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError):
        begin = line.rfind(_BEGIN)
        if begin <= 0:
            raise ValueError(_INCOMPLETE) from None
    try:
        return [json.loads(line[begin:])]
    except (ValueError, RecursionError):
        raise ValueError(_INCOMPLETE) from None


def _report(value: Any) -> Save | Load | Drain | Copies:
    event = value.get("event") if isinstance(value, dict) else None
    if event == "save":
        return _save(value)
    if event == "load":
        return Load(*(_field(value, field) for field in dataclasses.fields(Load)))
    if event == "drain":
        return Drain(*(_field(value, field) for field in dataclasses.fields(Drain)))
    if event == "copies":
        return Copies(*(_field(value, field) for field in dataclasses.fields(Copies)))
    raise ValueError("it is JSON, but neither the report of a save nor of a load")


def _save(value: Mapping[str, Any]) -> Save:
    known = {
        field.name: _field(value, field)
        for field in dataclasses.fields(Save)
        if field.name not in ("spreads", "held_spans_ms", "copies")
    }
    try:
        spreads = {name: _spread(one) for name, one in _mapping(value, "ranks_ms").items()}
        spans = [(str(part), _number(begin), _number(end)) for part, begin, end in value["held_spans_ms"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its 'ranks_ms' or 'held_spans_ms' is not as expected: {error!r}") from None
    return Save(**known, spreads=spreads, held_spans_ms=spans)


def _spread(one: Mapping[str, Any]) -> Spread:
    least, middle, most, slowest = (_number(one[name]) for name in ("min", "median", "max", "slowest_rank"))
    return Spread(least, middle, most, int(slowest))


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "None": (type(None),),
}


def _field(value: Mapping[str, Any], field: dataclasses.Field[Any]) -> Any:
    """Returns a field of a report after checking its type. Raises ValueError."""
    if field.name not in value and field.default is not dataclasses.MISSING:
        return field.default
    if field.name not in value:
        raise ValueError(f"its report has no {field.name!r}")
    found, declared = value[field.name], str(field.type)
    if declared.startswith("Mapping"):
        return _numbers(_mapping(value, field.name), field.name, is_nested="Mapping[str, Mapping" in declared)
    if declared == "Sequence[str]":
        return _names(value, field.name)
    kinds = tuple(kind for name in declared.split(" | ") for kind in _KINDS[name])
    if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
        raise ValueError(f"its {field.name!r} is {found!r}, expected {declared}")
    if isinstance(found, int | float) and not _is_finite(found):
        raise ValueError(f"its {field.name!r} is {found!r}, expected a finite number")
    return found


def _is_finite(number: float) -> bool:
    """Returns whether a number is finite as a float: JSON may have integers of thousands of digits."""
    return -1e300 < number < 1e300


def _numbers(found: Mapping[str, Any], name: str, *, is_nested: bool) -> Mapping[str, Any]:
    """Returns a field that maps names to numbers, or to mappings that do, after checking it."""
    try:
        for one in found.values():
            if is_nested:
                _numbers(one, name, is_nested=False)
            else:
                _number(one)
    except (AttributeError, ValueError):
        raise ValueError(f"its {name!r} is {found!r}, expected {'objects of ' * is_nested}numbers") from None
    return found


def _number(found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not _is_finite(found):
        raise ValueError(f"{found!r} is not a finite number")
    return float(found)


def _names(value: Mapping[str, Any], name: str) -> Sequence[str]:
    found = value.get(name)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(f"its {name!r} is {found!r}, expected a list of names")
    return found


def _mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"its {name!r} is {found!r}, expected an object")
    return found
