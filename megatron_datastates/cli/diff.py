"""datastates diff."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    PATH,
    READABLE,
    Table,
    advancing,
    argument,
    checkpoint_of,
    counted,
    iteration_option,
    json_option,
    keys_option,
    memory_option,
    print_json,
    reported_errors,
    require_plot,
    say,
)
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.parts import layer_name
from megatron_datastates.errors import printable

if TYPE_CHECKING:
    from megatron_datastates.convert.diff import Difference
    from megatron_datastates.convert.drift import Drift


@app.command()
@argument("first", metavar="A", type=READABLE, help="Directory of a checkpoint of any format, or of a run.")
@argument("second", metavar="B", type=READABLE, help="Directory of a checkpoint or run to compare with A.")
@keys_option
@click.option(
    "--plot",
    metavar="FILE.png",
    type=PATH,
    help="Draw how far apart layers and modules are, to this new file.",
)
@memory_option
@iteration_option
@json_option
def diff(
    first: Path,
    second: Path,
    keys: Sequence[str],
    plot: Path | None,
    memory: int,
    iteration: int | None,
    as_json: bool,
) -> None:
    """Compare the tensors of two checkpoints.

    Lists the tensors that B lacks (removed), that A lacks (added), and that differ, and by how much.

    Columns: "elements" is the number of elements that differ, and "not finite" how many of these are NaN
    or infinite in A or B. With a and b for elements of A and B that are both finite, "distance" is |a -
    b| / |a| with all elements as one vector; "absolute" is the largest |a - b| of an element; "relative"
    is the largest |a - b| / max(|a|, |b|). NaN equals NaN. All are computed in float64, where they may
    overflow to inf or nan (null in JSON). Of a dtype that torch cannot convert to float64, elements whose
    bytes differ are counted, and the rest is nan. A tensor that only one checkpoint has, or that has
    another shape in it, counts as different in all its layers. Optimizer state that is stored in buckets
    is compared by parameter, as the optimizer map describes it. Objects, such as states of random
    generators, and streams are not compared: "equal" says nothing of them.

    Exit codes: 0 equal; 1 different, or one is damaged; 2 they cannot be compared, or 130 interrupted
    (nothing was written).

    \b
    Example: datastates diff runs/gpt/iter_0001000 runs/gpt/iter_0002000 --keys 'decoder.*' --plot drift.png
    """
    with reported_errors():
        if plot is not None:
            require_plot(plot)
        paths = checkpoint_of(first, iteration), checkpoint_of(second, iteration)
        found = _compare(*paths, keys, memory)
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found)
    if plot is not None:  # last: a plot that fails does not lose the comparison
        from megatron_datastates.convert.pictures import plot_drift

        with reported_errors():
            plot_drift(found, (str(paths[0]), str(paths[1])), plot)
    raise click.exceptions.Exit(0 if found.equal else 1)


def _compare(first: Path, second: Path, keys: Sequence[str], memory_bytes: int) -> Difference:
    from megatron_datastates.convert.diff import choose_comparison
    from megatron_datastates.convert.diff import diff as compare_checkpoints
    from megatron_datastates.convert.views import by_parameter

    sources = [open_source(first), open_source(second)]
    for source in sources:
        source.note_files()
    one, other = by_parameter(sources)
    comparison = choose_comparison(one, other, keys)
    with advancing("comparing", comparison.bytes) as progress:
        found = compare_checkpoints(one, other, comparison, memory_bytes=memory_bytes, progress=progress)
    for source in sources:
        source.require_unchanged()
    if not keys:
        found.objects_not_compared = len({key for source in sources for key in source.objects})
        found.streams_not_compared = len({key for source in sources for key in source.streams})
    return found


def _as_json(found: Difference) -> dict[str, Any]:
    layers = {
        group: {layer_name(layer): _plain(drift) for layer, drift in sorted(drifts.items())}
        for group, drifts in found.layers.items()
    }
    modules = {
        group: {name: _plain(drift) for name, drift in sorted(drifts.items())}
        for group, drifts in found.modules.items()
    }
    rest = dataclasses.asdict(dataclasses.replace(found, tensors={}, groups={}, layers={}, modules={}))
    first = found.first_layer
    more = {"equal": found.equal, "first_layer": None if first is None else layer_name(first)}
    del rest["layers_apart"]
    drifts = {
        name: {key: _plain(drift) for key, drift in getattr(found, name).items()}
        for name in ("tensors", "groups")
    }
    return rest | drifts | {"layers": layers, "modules": modules} | more


def _plain(drift: Drift) -> dict[str, float]:
    plain = dataclasses.asdict(drift)
    del plain["squares_apart"], plain["squares_first"]
    return plain | {"distance": drift.distance}


def _print(found: Difference) -> None:
    for word, keys in (("removed", found.removed), ("added", found.added)):
        for key in keys:
            say(f"{word}: {printable(key)}")
    for what, pairs in (("shape", found.reshaped), ("dtype", found.retyped)):
        for key, (one, other) in pairs.items():
            say(f"{what}: {printable(key)}: {one} and {other}")
    _print_drifts("tensor", {key: drift for key, drift in found.tensors.items() if drift.changed})
    for group, layers in found.layers.items():
        by_name = {layer_name(layer): drift for layer, drift in sorted(layers.items()) if drift.changed}
        _print_drifts(f"layer, {group}", by_name)
    _print_drifts("group", {group: drift for group, drift in found.groups.items() if drift.changed})
    if found.first_layer is not None:
        say(f"first differing layer: {printable(layer_name(found.first_layer))}")
    changed = sum(1 for drift in found.tensors.values() if drift.changed)
    verdict = "equal" if found.equal else "different"
    others = [(found.objects_not_compared, "object"), (found.streams_not_compared, "stream")]
    left = " and ".join(counted(count, noun) for count, noun in others if count)
    text = f"{verdict}: {counted(len(found.tensors), 'tensor')} compared, {changed} changed"
    say(f"{text}; {left} not compared" if left else text)


def _print_drifts(what: str, drifts: Mapping[str, Drift]) -> None:
    if not drifts:
        return
    table = Table(">elements", ">distance", ">absolute", ">relative", ">not finite", what)
    for name, drift in drifts.items():
        numbers = (drift.distance, drift.largest_absolute, drift.largest_relative)
        table.add(f"{drift.changed}", *(f"{n:.3g}" for n in numbers), f"{drift.not_finite}", name)
    table.print()
