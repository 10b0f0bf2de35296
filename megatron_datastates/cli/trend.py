"""datastates trend."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    PATH,
    Table,
    advancing,
    json_option,
    keys_option,
    memory_option,
    note,
    print_json,
    reported_errors,
    require_directory,
    require_plot,
    run_argument,
    say,
)
from megatron_datastates.convert.parts import place_order

if TYPE_CHECKING:
    from megatron_datastates.convert.trend import Point, Step, Trend

_SPARKS, _DIGITS = "▁▂▃▄▅▆▇█", "12345678"
_MOST_SPARKS = 8
_LEGEND = (
    "(first and last norm; relative updates over time, the largest one and its iteration; the largest change "
    "of an element)"
)


@app.command()
@run_argument
@keys_option
@click.option(
    "--plot",
    metavar="FILE.png",
    type=PATH,
    help="Draw all layers over the iterations, to this new file.",
)
@memory_option
@json_option
def trend(root: Path, keys: Sequence[str], plot: Path | None, memory: int, as_json: bool) -> None:
    """Follow norms and updates of layers over a run's checkpoints.

    For each checkpoint, and for each layer or module over all of them: the norm of the finite elements, the
    update (the norm of the difference to the checkpoint before; "relative" is to the norm of that one), and
    the largest change of an element. Of a dtype that torch cannot convert to float64, such as float4, all
    are nan (null in JSON). Optimizer state that is stored in buckets counts by parameter.

    Every checkpoint, of any format, is read once; nothing is stored. One that is incomplete or damaged is
    skipped, with a line on standard error, and the update of the next one is not known then. Those of an
    abandoned branch, which `ls` marks with a dash, are left out, with a line on standard error, too.

    Exit codes: 0 done; 1 done, and some checkpoints were skipped; 2 it cannot be done.

    \b
    Example: datastates trend runs/gpt --keys 'decoder.*' --plot trend.png
    """
    with reported_errors():
        require_directory(root)
        if plot is not None:
            require_plot(plot)
        found = _follow(root, keys, memory)
    skipped = [step for step in found.steps if step.skipped]
    for step in skipped:
        note(f"datastates: skipped {step.path}: {step.skipped}")
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found)
    if plot is not None:  # last: a plot that fails does not lose the numbers
        from megatron_datastates.convert.pictures import plot_trend

        with reported_errors():
            plot_trend(found, str(root), plot)
    raise click.exceptions.Exit(1 if skipped else 0)


def _follow(run: Path, keys: Sequence[str], memory_bytes: int) -> Trend:
    from megatron_datastates.convert.trend import follow, open_run, select

    steps = open_run(run, lambda path: note(f"datastates: left out {path}: of an abandoned branch"))
    selection = select(steps, keys, str(run))
    with advancing("reading", selection.bytes) as progress:
        return follow(selection, memory_bytes=memory_bytes, progress=progress)


def _as_json(found: Trend) -> dict[str, Any]:
    checkpoints = [
        {"iteration": step.iteration, "path": str(step.path), "skipped": step.skipped or None}
        for step in found.steps
    ]
    groups: dict[str, Any] = {
        group: {"all": [_plain(point) for point in points], "places": {}}
        for group, points in found.groups().items()
    }
    for (group, place), points in _ordered(found):
        groups[group]["places"][place] = [_plain(point) for point in points]
    return {"checkpoints": checkpoints, "groups": groups}


def _ordered(found: Trend) -> list[tuple[tuple[str, str], list[Point | None]]]:
    return sorted(found.rows.items(), key=lambda row: (row[0][0], place_order(row[0][1])))


def _plain(point: Point | None) -> dict[str, float | None] | None:
    if point is None:
        return None
    names, update = ("update", "relative", "largest_change", "not_finite"), point.update
    if update is None:
        return {"norm": point.norm, **dict.fromkeys(names)}
    numbers = (update.norm, update.distance, update.largest_absolute, update.not_finite)
    return {"norm": point.norm, **dict(zip(names, numbers, strict=True))}


def _print(found: Trend) -> None:
    table = Table(">iteration", ">norm", ">update", ">relative", ">largest change", ">not finite", "of")
    for group, points in sorted(found.groups().items()):
        for step, point in zip(found.steps, points, strict=True):
            if point is not None:
                table.add(_name(step), *_cells(point), group)
    table.print()
    for group in sorted({group for group, _ in found.rows}):
        say()
        _print_places(found, group)
    if found.rows:
        say()
        say(_LEGEND)


def _name(step: Step) -> str:
    return step.path.name if step.iteration is None else str(step.iteration)


def _cells(point: Point) -> list[str]:
    update = point.update
    if update is None:
        return [f"{point.norm:.4g}", "-", "-", "-", "-"]
    numbers = (update.norm, update.distance, update.largest_absolute)
    return [f"{point.norm:.4g}", *(f"{number:.3g}" for number in numbers), str(update.not_finite)]


def _print_places(found: Trend, group: str) -> None:
    table = Table(">first", ">last", "updates", ">largest", ">at", ">change", group)
    for (one, place), points in _ordered(found):
        if one == group:
            table.add(*_row(found.steps, points), place)
    table.print()


def _row(steps: Sequence[Step], points: Sequence[Point | None]) -> list[str]:
    """Returns the cells of one place: over all checkpoints."""
    known = [(step, point) for step, point in zip(steps, points, strict=True) if point is not None]
    norms = [f"{known[0][1].norm:.3g}", f"{known[-1][1].norm:.3g}"]
    updates = [(step, point.update) for step, point in known if point.update is not None]
    if not updates:
        return [*norms, "", "-", "-", "-"]
    step, largest = max(updates, key=lambda one: (math.isnan(one[1].distance), one[1].distance))
    change = max(update.largest_absolute for _, update in updates)
    line = sparkline([None if p is None or p.update is None else p.update.distance for p in points[1:]])
    return [*norms, line, f"{largest.distance:.2g}", _name(step), f"{change:.2g}"]


def sparkline(values: Sequence[float | None]) -> str:
    """Draws values, from zero to the largest, in at most 8 characters; those not known are blank.

    Where several share a character, the largest is shown.
    """
    marks = _SPARKS if (sys.stdout.encoding or "").lower().startswith("utf") else _DIGITS
    count = min(len(values), _MOST_SPARKS)
    known = [None if value is None or math.isnan(value) else value for value in values]
    cells = [known[n * len(known) // count : (n + 1) * len(known) // count] for n in range(count)]
    heights = [max((value for value in cell if value is not None), default=None) for cell in cells]
    top = max((height for height in heights if height is not None), default=0.0)
    return "".join(" " if height is None else marks[_level(height, top)] for height in heights)


def _level(height: float, top: float) -> int:
    share = height / top if top and top != float("inf") else float(height == top and top > 0)
    return min(int(share * len(_DIGITS)), len(_DIGITS) - 1)
