"""The command line of benchmarks.scale: which layouts are measured, and what is printed and written."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.command import (
    PATH,
    Result,
    benchmark_command,
    choose,
    notes,
    print_bars,
    scratch,
    write_results,
)
from benchmarks.rounds import Bar
from benchmarks.scale import measures
from benchmarks.scale.layouts import LARGEST, LAYOUTS, QUICK, Layout

# Measures in their order, each with the file in the layout's folder that it needs from those before it.
NEEDS = {"plan": ".", "commit": "ranks.json"}
NEEDS |= dict.fromkeys(("load", "load_traced", "reshard", "reshard_traced"), "checkpoint")
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(  # imported once for all of them
    ["megatron.core.optimizer.distrib_optimizer", "megatron_datastates.mcore.load.reader"]
)


def measure(layout: Layout, name: str, folder: Path, limit_seconds: float) -> Result:
    """Returns what a measure sent until its end or its time limit; `status` says how it ended."""
    here, there = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(
        target=measures.run, args=(name, layout.model, layout.parallel, folder, there)
    )
    process.start()
    there.close()
    facts: Result = {}
    until = time.monotonic() + limit_seconds
    status = f"ended after its {limit_seconds:g} s"
    try:
        while here.poll(max(until - time.monotonic(), 0)):
            facts |= here.recv()
        process.kill()
    except EOFError:  # it has sent everything
        status = "done"
    process.join()
    if status == "done" and process.exitcode != 0:
        status = f"failed with {process.exitcode}"
    return facts | {"status": status}


def measure_layout(layout: Layout, folder: Path, limit_seconds: float) -> Result:
    """Runs all measures of one layout; one that needs what an earlier one did not leave is not run."""
    result: Result = {"ranks": layout.parallel.ranks, "curve": layout.curve}
    result |= {"model": dataclasses.asdict(layout.model), "parallel": dataclasses.asdict(layout.parallel)}
    inside = folder / layout.name
    inside.mkdir()
    for name, needed in NEEDS.items():
        if not (inside / needed).exists():
            result[name] = {"status": f"not run: there is no {needed}"}
            continue
        begin = time.monotonic()
        with notes.status(f"{layout.name}: {name}"):
            result[name] = measure(layout, name, inside, limit_seconds)
        notes.print(f"{layout.name}: {name}: {result[name]['status']}, {time.monotonic() - begin:.0f} s")
    shutil.rmtree(inside)
    return result


def bars_of(layouts: dict[str, Result]) -> list[Bar]:
    """Returns the bars of the largest layouts, where these were measured."""
    bars = []

    def add(layout: str, what: str, facts: Result, name: str, limit: float, unit: str) -> None:
        if name in facts:
            bars.append(Bar(f"{layout}: {what}", facts[name], limit, unit, at_least=False))

    for name, found in layouts.items():
        if found["ranks"] < LARGEST:
            continue
        add(name, "publishing, layout known", found["commit"], "cached_seconds", 2, "s")
        add(name, "manifest's work at load", found["load"], "seconds", 1, "s")
        add(name, "memory of it", found["load"], "peak_mib", 300, "MiB")
        add(name, "planning 8 times the tensors, of 8 times the time", found["plan"], "steepness", 1.25, "")
    return bars


def _print_layouts(layouts: dict[str, Result]) -> None:
    """Prints a table of the main facts, a layout a line."""
    columns = {
        "fragments": ("plan", "fragments", 1, ",.0f"),
        "plan a rank, ms": ("plan", "largest_rank_ms", 1, ".1f"),
        "index, MiB": ("commit", "merged_index_bytes", 1 << 20, ".1f"),
        "merge, s": ("commit", "merge_seconds", 1, ".2f"),
        "publish, s": ("commit", "cached_seconds", 1, ".3f"),
        "kept, MiB": ("commit", "kept_mib", 1, ".0f"),
        "load, s": ("load", "seconds", 1, ".3f"),
        "load, MiB": ("load", "peak_mib", 1, ".0f"),
        "reshard, s": ("reshard", "seconds", 1, ".3f"),
    }
    table = Table("layout", *columns)
    for name, found in layouts.items():
        cells = []
        for part, fact, scale, form in columns.values():
            value = found[part].get(fact)
            cells.append("not run" if value is None else format(value / scale, form))
        table.add_row(name, *cells)
    Console(width=150).print(table)


@benchmark_command
@click.option("--only", multiple=True, help="A layout to measure, by name.")
@click.option(
    "--quick", "is_quick", is_flag=True, help="Tiny models instead: seconds, and figures that mean little."
)
@click.option(
    "--limit-seconds", default=600.0, help="Time limit of each measure; a measure that exceeds it is ended."
)
@click.option("--folder", type=PATH, default=".", help="Where to publish; on the disk to be measured.")
@click.option("--out", type=PATH, help="Write the results to this JSON file, and a picture (.svg) beside it.")
def run(only: Sequence[str], is_quick: bool, limit_seconds: float, folder: Path, out: Path | None) -> None:
    """Simulates checkpoints of 8 to 16,384 ranks: what planning, publishing and opening them costs.

    Layouts are planned from the shapes of real models. The code measured is the code that saves and loads;
    each measure runs in its own process. No data is written: data files are sparse.

    \b
    Examples:
      python -m benchmarks.scale --out benchmarks/results/scale.json
      python -m benchmarks.scale --only 70B-512 --only 1T-MoE-16384
      python -m benchmarks.scale --quick             # only to see that it works
    """
    known = {layout.name: layout for layout in (QUICK if is_quick else LAYOUTS)}
    chosen = choose(only, known, list(known), "layout")
    results: Result = {"machine": machine.describe(folder), "layouts": {}, "bars": []}
    bars: list[Bar] = []
    with scratch(folder) as inside:
        for name in chosen:
            results["layouts"][name] = measure_layout(known[name], inside, limit_seconds)
            bars = bars_of(results["layouts"])
            results["bars"] = [bar.plain() for bar in bars]
            _write(results, out)  # each time: the whole takes long, and nothing measured should be lost
    _print_layouts(results["layouts"])
    print_bars(bars)


def _write(results: Result, out: Path | None) -> None:
    write_results(results, out)
    if out is not None:
        from benchmarks.scale import picture  # here: matplotlib is needed for pictures only

        picture.draw(results, out.with_suffix(".svg"))


if __name__ == "__main__":
    run()
