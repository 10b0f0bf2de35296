"""Draws the saves of a run: against the clock and its iterations, one by one, and over all ranks.

Needs matplotlib. Panels without data (held time in saves of DCP, ranks in a run of one) are left out.
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from megatron_datastates.errors import optional_package, plot_text
from megatron_datastates.reports.advice import milliseconds
from megatron_datastates.reports.reading import Save
from megatron_datastates.reports.timing import held_shares, intervals, iteration_seconds
from megatron_datastates.units import size_text

HELD = "#c0392b"
STAGES = {  # from the milestone before, in the order of a save
    "copied": "#1f6f8b",
    "serialized": "#8e7cc3",
    "written": "#4fa3a5",
    "durable": "#e0a030",
    "copies": "#b5651d",  # on other nodes
    "published": "#5d8a3a",
    "drained": "#9aa5ad",  # from a near tier to --save
}
PARTS = {
    "save_checkpoint": ("Megatron's part of save_checkpoint", "#d9a5a0"),
    "state_dict": ("making the state dict", "#777777"),
    "save": ("ds.save, waiting", "#d9a5a0"),
    "wait": ("waiting for an asynchronous save", "#d9a5a0"),
    "start": ("start", "#c0392b"),
    "until_poll": ("until the first poll", "#b8b8b8"),
    "fence": ("fence", "#1f6f8b"),
    "polls": ("polls", "#e0a030"),
    "finalize": ("finalize", "#5d8a3a"),
}
_IN_DETAIL = 6  # saves in the panel that shows single ones
_MOST_MARKS = 40  # saves with a marker each
_MOST_LABELS = 12
_MOST_HOVERS = 200  # in a panel; narrower ones cannot be pointed at, and each costs time and bytes
_LEAST_WIDTH = 0.0015  # of the width of the picture, so that a short bar can be seen
_LEGEND = {"fontsize": 7, "loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
_SVG = "http://www.w3.org/2000/svg"


def require_matplotlib() -> Any:
    """Returns the module matplotlib. Raises MissingPackageError if it is not installed."""
    with optional_package("a picture needs matplotlib, which cannot be imported", "plot"):
        importlib.import_module("matplotlib.figure")
        return importlib.import_module("matplotlib")


def draw(saves: Sequence[Save], title: str) -> Any:
    """Returns a matplotlib figure of the saves. Raises MissingPackageError."""
    panels: list[tuple[float, Callable[[Any, Sequence[Save]], None]]] = [
        (2.2, _draw_clock),
        (0.8 + 0.42 * min(len(saves), _IN_DETAIL), _draw_details),
        (2.6, _draw_milestones),
    ]
    if any(save.held_ms for save in saves):
        panels.append((2.2, _draw_parts))
    if any(save.ranks > 1 and "writing" in save.spreads for save in saves):
        panels += [(2.0, _draw_spread), (1.6, _draw_slowest)]
    matplotlib = require_matplotlib()
    matplotlib.rcParams["svg.hashsalt"] = "datastates"  # the same reports make the same file
    matplotlib.rcParams["axes.titlesize"] = 10
    heights = [height for height, _ in panels]
    figure = matplotlib.figure.Figure(figsize=(11, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(plot_text(title), fontsize=11)
    for axes, (_, panel) in zip(figure.subplots(len(panels), 1, height_ratios=heights), panels, strict=True):
        panel(axes, saves)
        axes.tick_params(which="both", labelsize=8)
    return figure


def write_png(figure: Any, path: Path) -> None:
    """Writes the figure as a PNG."""
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})


def svg_text(figure: Any, saves: Sequence[Save]) -> str:
    """Returns the figure as an SVG element; what a save did appears where the pointer rests on it."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(stream.getvalue())
    for element in root.iter(f"{{{_SVG}}}g"):
        name, _, number = element.get("id", "").partition("/")
        if name.startswith("save"):
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = describe(saves[int(number)])
            element.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def describe(save: Save) -> str:
    """Returns what one save did, in lines."""
    published = "never" if save.published_ms is None else milliseconds(save.published_ms)
    held = f"held {milliseconds(save.held_ms)}, {milliseconds(save.fence_ms)} of it at the fence"
    lines = [
        f"{save.title}: {save.state}",
        *([] if save.mode == "dcp" else [held]),
        f"copied after {milliseconds(save.staging_ms)}, serialized after {milliseconds(save.serializing_ms)}",
        f"written after {milliseconds(save.writing_ms)}, durable after {milliseconds(save.durable_ms)}",
        f"published after {published}",
    ]
    if save.copies is not None:
        made = f"copied {size_text(save.copies.bytes)} from {', '.join(save.copies.partners) or 'no node'}"
        missing = f"; copies are missing: {save.copies.error}" if save.copies.error else ""
        lines.append(f"{made} in {milliseconds(save.copies.copying_ms)}{missing}")
    if save.far_ms is not None:
        lines.append(f"in --save after {milliseconds(save.far_ms)}")
    return "\n".join([*lines, save.error] if save.error else lines)


def _stages(save: Save) -> list[tuple[str, float, float]]:
    """Returns each stage with its begin and end, in milliseconds."""
    stages = [("copied", 0.0, save.staging_ms), ("serialized", 0.0, save.serializing_ms)]
    stages.append(("written", min(save.staging_ms, save.writing_ms), save.writing_ms))
    if save.durable_ms:
        stages.append(("durable", save.writing_ms, save.durable_ms))
    if save.copies_ms is not None:
        stages.append(("copies", *save.copies_ms))
    if save.published_ms is not None:
        before = save.durable_ms if save.copies_ms is None else save.copies_ms[1]
        stages.append(("published", min(before, save.published_ms), save.published_ms))
        if save.far_ms is not None:
            stages.append(("drained", save.published_ms, save.far_ms))
    return stages


def _begins(saves: Sequence[Save]) -> list[float]:
    """Returns when each save began, in seconds from the first one; pauses between runs are left out.

    One that began before its predecessor (the clock was set back, or two runs overlap) is drawn with it.
    """
    begins: list[float] = []
    for number, save in enumerate(saves):
        if number == 0:
            begins.append(0.0)
            continue
        before = saves[number - 1]
        passed = max(save.started_at - before.started_at, 0.0)
        if save.run != before.run:
            steps = [b - a for a, b in itertools.pairwise(begins)]
            passed = min(passed, max(steps, default=passed))
        begins.append(begins[-1] + passed)
    return begins


def _shown_stages(saves: Sequence[Save]) -> list[str]:
    """Returns all stages; those of a near tier only if there was one."""
    has = {
        "drained": any(save.far_ms is not None for save in saves),
        "copies": any(save.copies_ms is not None for save in saves),
    }
    return [name for name in STAGES if has.get(name, True)]


def _draw_clock(axes: Any, saves: Sequence[Save]) -> None:
    begins = _begins(saves)
    end = max(begin + _last_ms(save) / 1000 for begin, save in zip(begins, saves, strict=True))
    least = _LEAST_WIDTH * max(end, 1e-3)
    lanes = ["trainer held", *_shown_stages(saves)]
    bars: dict[str, list[tuple[float, float]]] = {lane: [] for lane in lanes}
    for begin, save in zip(begins, saves, strict=True):
        bars["trainer held"] += [
            (begin + a / 1000, max((b - a) / 1000, least)) for _, a, b in save.held_spans_ms
        ]
        for name, a, b in _stages(save):
            bars[name].append((begin + a / 1000, max((b - a) / 1000, least)))
    for place, lane in enumerate(lanes):
        color = STAGES.get(lane, HELD)
        spans = _joined(bars[lane], least)
        axes.broken_barh(spans, (place - 0.35, 0.7), color=color, linewidth=0, alpha=0.85)
    failed = [begin for begin, save in zip(begins, saves, strict=True) if save.failed]
    axes.plot(failed, [len(lanes) - 1] * len(failed), "x", color=HELD, label="failed")
    _mark_runs(axes, saves, begins)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(min(0.0, *(a / 1000 for _, a, _ in saves[0].held_spans_ms), -0.01 * end), end * 1.01)
    axes.set_xlabel("seconds since the first save", fontsize=8)
    axes.set_title("Every save against the clock; above: its iteration", loc="left", pad=18)
    above = axes.secondary_xaxis("top")
    chosen = _spaced(begins, end)
    above.set_xticks([begins[i] for i in chosen], [plot_text(saves[i].label) for i in chosen])
    above.tick_params(labelsize=7, length=2)
    edges = [*begins, end]
    for i, after in _hovered(len(saves)):
        _hover(axes, i, begins[i], max(edges[after], begins[i] + least), "clock")


def _joined(spans: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Returns spans (begin, length), those less than `gap` apart, which looks like no gap, as one."""
    joined: list[tuple[float, float]] = []
    for begin, length in sorted(spans):
        if joined and begin - sum(joined[-1]) < gap:
            first, reached = joined[-1]
            joined[-1] = (first, max(reached, begin + length - first))
        else:
            joined.append((begin, length))
    return joined


def _last_ms(save: Save) -> float:
    return max(
        save.durable_ms,
        save.published_ms or 0.0,
        save.far_ms or 0.0,
        *(b for _, _, b in save.held_spans_ms),
        0.0,
    )


def _spaced(places: Sequence[float], end: float) -> list[int]:
    """Returns the numbers of places that are far enough apart for labels."""
    chosen: list[int] = []
    for i, place in enumerate(places):
        if not chosen or place - places[chosen[-1]] >= end / (1.5 * _MOST_LABELS):
            chosen.append(i)
    return chosen


def _draw_details(axes: Any, saves: Sequence[Save]) -> None:
    first = max(len(saves) - _IN_DETAIL, 0)
    last = saves[first:]
    end = max(_last_ms(save) for save in last) or 1.0
    least = _LEAST_WIDTH * end
    seen: set[str] = set()
    for row, save in enumerate(last):
        spans = [(a, max(b - a, least)) for _, a, b in save.held_spans_ms]
        axes.broken_barh(spans, (row - 0.42, 0.26), color=HELD, label=_once("trainer held", seen))
        for name, a, b in _stages(save):
            place = (row + 0.14, 0.26) if name == "serialized" else (row - 0.14, 0.26)
            label = _once(name, seen)
            axes.broken_barh([(a, max(b - a, least))], place, color=STAGES[name], label=label)
    title = "The last saves, one by one"
    step = iteration_seconds(saves)
    if step and end / 1000 / step < 400:
        every = max(1, round(end / 1000 / step / 20))
        for i in range(0, int(end / 1000 / step) + 1, every):
            axes.axvline(i * step * 1000, color="#999999", linewidth=0.6, linestyle=":", zorder=0)
        lines = "iterations" if every == 1 else f"{every} iterations"
        title += f"; between two dotted lines: {'an iteration' if every == 1 else lines}"
        title += f" ({milliseconds(step * every * 1000)}, estimated from the interval between saves)"
    axes.set_title(title, loc="left")
    names = [plot_text(save.title) + " ✗" * save.failed for save in last]
    axes.set_yticks(range(len(last)), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the save began", fontsize=8)
    axes.legend(**_LEGEND)
    low = min([0.0, *(a for save in last for _, a, _ in save.held_spans_ms)]) - 0.01 * end
    axes.set_xlim(low, end * 1.01)
    for row in range(len(last)):
        _hover(axes, first + row, low, end * 1.01, "detail", rows=(row - 0.45, row + 0.45))


def _once(name: str, seen: set[str]) -> str:
    """Returns the label of the first artist of a kind; later ones are not in the legend."""
    label = f"_{name}" if name in seen else name
    seen.add(name)
    return label


def _draw_milestones(axes: Any, saves: Sequence[Save]) -> None:
    milestones: dict[str, Callable[[Save], float | None]] = {
        "trainer held": lambda save: save.held_ms,
        "copied": lambda save: save.slowest_ms("staging"),
        "serialized": lambda save: save.serializing_ms,
        "written": lambda save: save.slowest_ms("writing"),
        "durable": lambda save: save.slowest_ms("durable"),
        "copies": lambda save: save.copies_ms and save.copies_ms[1],
        "published": lambda save: save.published_ms,
        "drained": lambda save: save.far_ms,
    }
    places, dots = range(len(saves)), {"marker": "." if len(saves) <= _MOST_MARKS else "", "markersize": 5}
    for name in ("trainer held", *_shown_stages(saves)):
        known = [value if value and value > 0 else math.nan for value in map(milestones[name], saves)]
        axes.plot(places, known, linewidth=1.2, color=STAGES.get(name, HELD), label=name, **dots)
    between = [math.nan if seconds is None else seconds * 1000 for seconds in intervals(saves)]
    axes.plot(places, between, "--", label="next save begins", color="#555555", linewidth=1, **dots)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")  # 20, not 2 x 10^1
    axes.yaxis.set_minor_formatter(importlib.import_module("matplotlib.ticker").LogFormatter())
    axes.set_ylabel("ms since its start", fontsize=8)
    axes.set_title(
        "How long each save took to its milestones (slowest rank), and held the trainer", loc="left"
    )
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.legend(**_LEGEND)
    _label_saves(axes, saves, "milestones")


def _draw_parts(axes: Any, saves: Sequence[Save]) -> None:
    places, below = range(len(saves)), [0.0] * len(saves)
    shares = [held_shares(save) for save in saves]
    others = sorted({name for share in shares for name in share} - PARTS.keys())
    for name in [*PARTS, *others]:
        values = [share.get(name, 0.0) for share in shares]
        if not any(values):
            continue
        label, color = PARTS.get(name, (plot_text(name), "#777777"))
        above = [a + b for a, b in zip(below, values, strict=True)]
        if len(saves) <= _MOST_MARKS:
            axes.bar(places, values, 0.7, bottom=below, color=color, label=label, linewidth=0)
        else:  # one shape in place of thousands
            axes.fill_between(places, below, above, step="mid", color=color, label=label, linewidth=0)
        below = above
    axes.set_ylabel("ms", fontsize=8)
    axes.set_title("What held the trainer", loc="left")
    axes.legend(**_LEGEND)
    _label_saves(axes, saves, "parts")


def _draw_spread(axes: Any, saves: Sequence[Save]) -> None:
    known = [(i, save.spreads["writing"]) for i, save in enumerate(saves) if "writing" in save.spreads]
    places = [i for i, _ in known]
    color, few = STAGES["written"], len(saves) <= _MOST_MARKS
    low, high = [one.least for _, one in known], [one.most for _, one in known]
    if few:
        axes.vlines(places, low, high, color=color, linewidth=4, alpha=0.4, label="all ranks")
    else:
        axes.fill_between(places, low, high, color=color, alpha=0.4, linewidth=0, label="all ranks")
    axes.plot(places, [one.median for _, one in known], ".", markersize=5, color=color, label="median rank")
    axes.plot(
        places, high, "_" if few else "-", markersize=7, linewidth=0.6, color=HELD, label="slowest rank"
    )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms", fontsize=8)
    axes.set_title("Writing, over all ranks", loc="left")
    axes.legend(**_LEGEND)
    _label_saves(axes, saves, "spread")


def _draw_slowest(axes: Any, saves: Sequence[Save]) -> None:
    for name, marker, color in (("writing", "o", STAGES["written"]), ("held", "x", HELD)):
        known = [(i, save.spreads[name].slowest_rank) for i, save in enumerate(saves) if name in save.spreads]
        label = "to write" if name == "writing" else "held longest"
        axes.plot(
            [i for i, _ in known], [rank for _, rank in known], marker, markersize=4, color=color, label=label
        )
    ranks = max(save.ranks for save in saves)
    axes.set_ylim(-0.05 * ranks - 0.3, ranks * 1.05 - 0.7)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("rank", fontsize=8)
    axes.set_xlabel("iteration", fontsize=8)
    axes.set_title(f"Which of {ranks} ranks was the slowest", loc="left")
    axes.legend(**_LEGEND)
    _label_saves(axes, saves, "slowest")


def _label_saves(axes: Any, saves: Sequence[Save], panel: str) -> None:
    chosen = _spaced(range(len(saves)), len(saves))
    axes.set_xticks(chosen, [plot_text(saves[i].label) for i in chosen])
    axes.set_xlim(-0.6, len(saves) - 0.4)
    _mark_runs(axes, saves, [i - 0.5 for i in range(len(saves))])
    for i, after in _hovered(len(saves)):
        _hover(axes, i, i - 0.5, after - 0.5, panel)


def _mark_runs(axes: Any, saves: Sequence[Save], places: Sequence[float]) -> None:
    """Draws a line where another run begins."""
    for before, save, place in zip(saves, saves[1:], places[1:], strict=False):
        if save.run != before.run:
            axes.axvline(place, color="#555555", linewidth=0.8, linestyle="-.", zorder=0)


def _hovered(count: int) -> list[tuple[int, int]]:
    """Returns which saves have an area for the pointer, and the first save after each area."""
    step = math.ceil(count / _MOST_HOVERS)
    return [(i, min(i + step, count)) for i in range(0, count, step)]


def _hover(
    axes: Any, number: int, low: float, high: float, panel: str, rows: tuple[float, float] | None = None
) -> None:
    """Lays an almost transparent area over a save, which svg_text attaches its description to."""
    faint = {"color": "#ffffff", "alpha": 0.004, "linewidth": 0, "zorder": 9}
    if rows is None:
        area = axes.axvspan(low, high, **faint)
    else:
        area = axes.fill_between([low, high], *rows, **faint)
    area.set_gid(f"save-{panel}/{number}")
