"""Pictures of comparisons: how far apart two checkpoints are, and a run's checkpoints one after another.

Needs matplotlib. A row of panels for each group (the model, each kind of optimizer state), as their numbers
differ by orders of magnitude; all axes of values begin at zero.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_datastates.convert.diff import Difference
from megatron_datastates.convert.drift import Drift
from megatron_datastates.convert.parts import is_layer, layer_name, place_order
from megatron_datastates.convert.sinks.target import publish_on_exit
from megatron_datastates.convert.trend import Point, Trend
from megatron_datastates.errors import optional_package, plot_text

_WIDTH_INCHES = {2: 11, 3: 15}  # by columns
_PANEL_INCHES = 2.1
_HEAD_INCHES = 0.8  # title, and the labels of the lowest axes
_DPI = 120
_MOST_TICKS = 12  # of layers
_MOST_MODULES = 12  # outside of the layers; those with the largest distance
_COLORS = ("#1f6f8b", "#c0392b", "#8e7cc3", "#e0a030")  # of stacks of layers
_DASHES = ("--", ":", "-.")  # of modules outside of the layers
_MOST_IN_LEGEND = 10  # layers
_LONG = 44  # characters of a name in the title


def require_plotting() -> Any:
    """Returns the module matplotlib.figure. Raises MissingPackageError if matplotlib is not installed."""
    with optional_package("a plot needs matplotlib, which cannot be imported", "plot"):
        return importlib.import_module("matplotlib.figure")


def plot_drift(difference: Difference, names: tuple[str, str], target: Path) -> None:
    """Writes a PNG of how far apart each layer, and each module outside of the layers, is.

    Args:
        names: of the two checkpoints.

    Raises:
        MissingPackageError: matplotlib is not installed.
        StorageError: the target exists.
        OSError: the target cannot be written.
    """
    groups = sorted(difference.groups.keys() & (difference.layers.keys() | difference.modules.keys()))
    title = f"Difference of two checkpoints\nA: {_short(names[0])}\nB: {_short(names[1])}"
    figure, rows = _panels(groups, 2, title)
    places = _places(difference, groups)
    for group, (distance, absolute) in zip(groups, rows, strict=True):
        drifts = _by_place(difference, group)
        _draw_places(distance, places, {place: drift.distance for place, drift in drifts.items()})
        _draw_places(absolute, places, {place: drift.largest_absolute for place, drift in drifts.items()})
        distance.set_ylabel(plot_text(group), fontsize=9)
    if groups:
        rows[0][0].set_title("distance: |A - B| / |A| of all elements as one vector", fontsize=9)
        rows[0][1].set_title("largest |A - B| of an element", fontsize=9)
        for axes in rows[-1]:
            _label_places(axes, places)
    _save(figure, target)


def plot_trend(trend: Trend, name: str, target: Path) -> None:
    """Writes a PNG of norms, updates and largest changes over the iterations of a run: a line for each place.

    Layers are colored by number. Raises as plot_drift.

    Args:
        name: of the run.
    """
    groups = sorted(trend.groups())
    skipped = sum(1 for step in trend.steps if step.skipped)
    counts = f"{len(trend.steps)} checkpoints" + (f", {skipped} of them skipped" if skipped else "")
    figure, rows = _panels(groups, len(_VALUES), f"Norms and updates of {_short(name)}: {counts}")
    iterations = [step.iteration or 0 for step in trend.steps]
    for group, panels in zip(groups, rows, strict=True):
        panels[0].set_ylabel(plot_text(group), fontsize=9)
        lines = {place: points for (one, place), points in trend.rows.items() if one == group}
        for axes, value in zip(panels, _VALUES.values(), strict=True):
            _draw_lines(axes, iterations, lines, value)
    if groups:
        for axes, title in zip(rows[0], _VALUES, strict=True):
            axes.set_title(title, fontsize=9)
        for axes in rows[-1]:
            axes.set_xlabel("iteration", fontsize=9)
        _explain_lines(figure, rows[0][0])
    _save(figure, target)


_VALUES: dict[str, Callable[[Point], float | None]] = {
    "norm": lambda point: point.norm,
    "update: |change| / |before| since the checkpoint before": lambda point: (
        None if point.update is None else point.update.distance
    ),
    "largest change of an element": lambda point: (
        None if point.update is None else point.update.largest_absolute
    ),
}


def _draw_lines(
    axes: Any,
    iterations: Sequence[int],
    lines: Mapping[str, Sequence[Point | None]],
    value: Callable[[Point], float | None],
) -> None:
    """Draws a line for each place; where a value is not known, it has a gap."""
    layers = [place for place in sorted(lines, key=place_order) if is_layer(place)]
    others = [place for place in sorted(lines, key=place_order) if not is_layer(place)]
    styles = {place: {"color": _color(n, len(layers))} for n, place in enumerate(layers)}
    for n, place in enumerate(others):
        styles[place] = {"color": "#555555", "linestyle": _DASHES[n % len(_DASHES)]}
    for place, style in styles.items():
        found = [None if point is None else value(point) for point in lines[place]]
        finite = [math.nan if one is None or not math.isfinite(one) else one for one in found]
        axes.plot(iterations, finite, marker=".", markersize=3, linewidth=1, label=plot_text(place), **style)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _color(number: int, count: int) -> Any:
    """Returns the color of a layer: from dark to light with its depth."""
    return importlib.import_module("matplotlib").colormaps["viridis"](0.9 * number / max(count - 1, 1))


def _explain_lines(figure: Any, axes: Any) -> None:
    """Adds a legend: modules, and some of the layers."""
    handles, labels = axes.get_legend_handles_labels()
    layers = [n for n, label in enumerate(labels) if is_layer(label)]
    step = -(-len(layers) // _MOST_IN_LEGEND) or 1
    shown = layers[::step] + [n for n in range(len(labels)) if n not in layers][:_MOST_IN_LEGEND]
    figure.legend(
        [handles[n] for n in shown], [labels[n] for n in shown], loc="outside right upper", fontsize=7
    )


def _panels(groups: Sequence[str], columns: int, title: str) -> tuple[Any, Any]:
    """Returns a figure, and its panels: a row for each group."""
    count = max(len(groups), 1)
    height = _HEAD_INCHES + _PANEL_INCHES * count
    figure = require_plotting().Figure(figsize=(_WIDTH_INCHES[columns], height), layout="constrained")
    figure.suptitle(plot_text(title), fontsize=11, x=0.01, ha="left")
    rows = figure.subplots(count, columns, sharex="all", squeeze=False)
    for axes in rows.flat:
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, rows


def _short(name: str) -> str:
    return name if len(name) <= 2 * _LONG else f"{name[:_LONG]}...{name[-_LONG:]}"


def _by_place(found: Difference, group: str) -> dict[str, Drift]:
    layers = {layer_name(layer): drift for layer, drift in found.layers.get(group, {}).items()}
    return layers | found.modules.get(group, {})


def _places(found: Difference, groups: Sequence[str]) -> list[str]:
    """Returns all places in order; of modules outside of the layers those that changed most."""
    layers = {layer_name(layer) for group in groups for layer in found.layers.get(group, {})}
    modules: dict[str, float] = {}
    for group in groups:
        for place, drift in found.modules.get(group, {}).items():
            distance = math.inf if math.isnan(drift.distance) else drift.distance
            modules[place] = max(modules.get(place, 0.0), distance)
    most = sorted(modules, key=lambda place: -modules[place])[:_MOST_MODULES]
    return sorted({*layers, *most}, key=place_order)


def _positions(places: Sequence[str]) -> dict[str, float]:
    """Returns where places are on the axis: layers one apart, modules as far as their labels need."""
    apart = _apart(places)
    found, at = {}, 0.0
    for before, place in zip([None, *places], places, strict=False):
        at += 0 if before is None else 1 if is_layer(before) and is_layer(place) else apart
        found[place] = at
    return found


def _apart(places: Sequence[str]) -> float:
    return max(1.0, sum(map(is_layer, places)) / 14)


def _draw_places(axes: Any, places: Sequence[str], values: Mapping[str, float]) -> None:
    """Draws a line for each stack of layers, and a bar for each other module."""
    positions = _positions(places)
    width = 0.4 * _apart(places)
    stacks: dict[str, list[tuple[float, float]]] = {}
    for place, at in positions.items():
        if place not in values:
            continue
        value = values[place]
        if not math.isfinite(value):
            axes.text(at, 0.9, str(value), ha="center", fontsize=7, transform=axes.get_xaxis_transform())
        elif is_layer(place):
            stacks.setdefault(place.rpartition(".")[0], []).append((at, value))
        else:
            axes.bar(at, value, width=width, color="#9aa5ab")
    for color, (stack, points) in zip(itertools.cycle(_COLORS), stacks.items(), strict=False):
        axes.plot(*zip(*points, strict=True), marker=".", color=color, label=plot_text(stack))
    if len(stacks) > 1:
        axes.legend(fontsize=7)
    axes.set_ylim(bottom=0)


def _label_places(axes: Any, places: Sequence[str]) -> None:
    """Names the modules, and numbers some of the layers."""
    positions = _positions(places)
    layers = [place for place in places if is_layer(place)]
    step = -(-len(layers) // _MOST_TICKS) or 1
    shown = {place: place for place in places if not is_layer(place)}
    numbers = {place: place.rpartition(".")[2] for place in layers}
    shown |= {place: number for place, number in numbers.items() if int(number) % step == 0}
    axes.set_xticks([positions[place] for place in shown], list(map(plot_text, shown.values())))
    for label, place in zip(axes.get_xticklabels(), shown, strict=True):
        if not is_layer(place):
            label.set(rotation=30, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set_xlabel("layer", fontsize=9)


def _save(figure: Any, target: Path) -> None:
    figure.align_ylabels()
    with publish_on_exit(target) as temporary:
        figure.savefig(temporary, format="png", dpi=_DPI)
