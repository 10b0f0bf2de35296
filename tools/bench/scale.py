"""What checkpoints of up to 16,384 ranks cost before and after their bytes move: simulated, without data.

Layouts are planned from the shapes of real models (scale_states.py). The code measured is the one that saves
and loads; each measure runs in a process of its own (scale_measures.py). No data file is written.

    python tools/bench/scale.py --out tools/bench/results/scale.json    # everything, with a picture beside it
    python tools/bench/scale.py --only 70B-512 --only 1T-MoE-16384
    python tools/bench/scale.py --quick                                 # tiny models, to see that it works
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import machine
import scale_measures
import typer
from rich.console import Console
from rich.table import Table
from rounds import Bar, print_bars
from scale_states import Model, Parallel

# Measures in their order, and what one needs of those before it, in the folder of its layout.
NEEDS = {"plan": ".", "commit": "ranks.json"}
NEEDS |= dict.fromkeys(("load", "load_traced", "reshard", "reshard_traced"), "checkpoint")
LARGEST = 16_384  # ranks, which the bars are about
Result = dict[str, Any]
notes = Console(stderr=True)
PROCESSES = multiprocessing.get_context("forkserver")
# Imported once for all of them; modules of this folder cannot be found there.
PROCESSES.set_forkserver_preload(
    ["megatron.core.optimizer.distrib_optimizer", "megatron_datastates.mcore.load.reader"]
)

LLAMA = Model("Llama 3 70B", 80, 8192, 28672, heads=64, groups=8, vocabulary=128256)
DENSE = Model("dense 1T", 128, 25600, 102400, heads=160, groups=160, vocabulary=51200, gated=False)
EXPERTS = Model("MoE 1T", 64, 7168, 2048, heads=64, groups=8, vocabulary=163840, experts=384)
TINY = Model("tiny", 4, 64, 128, heads=8, groups=8, vocabulary=1000)
FEW = dataclasses.replace(TINY, name="tiny MoE", experts=8)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One training, and the curve of the picture that it is on (None: a point of its own)."""

    name: str
    model: Model
    parallel: Parallel
    curve: str | None = None


def _grown(name: str, model: Model, first: Parallel, sizes: Sequence[int]) -> list[Layout]:
    """One model on more and more data-parallel ranks."""
    grown = [dataclasses.replace(first, dp=ranks // (first.tp * first.pp)) for ranks in sizes]
    return [Layout(f"{name}-{parallel.ranks}", model, parallel, name) for parallel in grown]


# Megatron's default buckets grow with the data-parallel size, so that each of 16,384 ranks has only tens of
# fragments. The last layout has buckets small enough for six million of them in all.
LAYOUTS = [
    *_grown("70B", LLAMA, Parallel(tp=8), (8, 512, 4096, LARGEST)),
    *_grown("1T", DENSE, Parallel(tp=8, pp=64), (512, 4096, LARGEST)),
    *_grown("1T-MoE", EXPERTS, Parallel(tp=8, ep=128), (512, 4096, LARGEST)),
    Layout(
        "1T-MoE-small-buckets-16384",
        EXPERTS,
        Parallel(tp=8, dp=2048, ep=128, bucket_elements=80_000_000),
    ),
]
QUICK = [
    *_grown("tiny", TINY, Parallel(tp=2, bucket_elements=20_000), (8,)),
    Layout("tiny-MoE-16", FEW, Parallel(tp=2, pp=2, dp=4, ep=4, bucket_elements=20_000)),
]


def measure(layout: Layout, name: str, folder: Path, limit_seconds: float) -> Result:
    """What a measure told, until its end or its time limit. `status` says how it ended."""
    here, there = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(
        target=scale_measures.run, args=(name, layout.model, layout.parallel, folder, there)
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
    except EOFError:  # it has told everything
        status = "done"
    process.join()
    if status == "done" and process.exitcode != 0:
        status = f"failed with {process.exitcode}"
    return facts | {"status": status}


def measure_layout(layout: Layout, folder: Path, limit_seconds: float) -> Result:
    """All measures of one layout; one whose forerunner did not end well is not run."""
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
    """The project's promises about the largest layouts; those that were not measured have no bar."""
    bars = []

    def add(layout: str, what: str, facts: Result, name: str, limit: float, unit: str) -> None:
        if name in facts:
            bars.append(Bar(f"{layout}: {what}", facts[name], limit, unit, at_least=False))

    for name, found in layouts.items():
        if found["ranks"] < LARGEST:
            continue
        add(name, "commit, layout known", found["commit"], "cached_seconds", 2, "s")
        add(name, "manifest's work at load", found["load"], "seconds", 1, "s")
        add(name, "memory of it", found["load"], "peak_mib", 300, "MiB")
        add(name, "planning 8 times the tensors, of 8 times the time", found["plan"], "steepness", 1.25, "")
    return bars


def _print(layouts: dict[str, Result]) -> None:
    columns = {
        "fragments": ("plan", "fragments", 1, ",.0f"),
        "plan a rank, ms": ("plan", "largest_rank_ms", 1, ".1f"),
        "index, MiB": ("commit", "merged_index_bytes", 1 << 20, ".1f"),
        "merge, s": ("commit", "merge_seconds", 1, ".2f"),
        "commit, s": ("commit", "cached_seconds", 1, ".3f"),
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


def run(
    only: Annotated[list[str] | None, typer.Option(help="Layouts to measure, by name.")] = None,
    quick: Annotated[
        bool, typer.Option(help="Tiny models instead: seconds, and no figures to speak of.")
    ] = False,
    limit_seconds: Annotated[
        float, typer.Option(help="Of one measure; what is late is not measured.")
    ] = 600.0,
    folder: Annotated[Path, typer.Option(help="Where to commit; on the disk in question.")] = Path(),
    out: Annotated[
        Path | None, typer.Option(help="Write the results to this JSON file, and a picture (.svg) beside it.")
    ] = None,
) -> None:
    """Simulates checkpoints of 8 to 16,384 ranks: what planning, committing and opening them costs."""
    known = {layout.name: layout for layout in (QUICK if quick else LAYOUTS)}
    chosen = only or list(known)
    unknown = set(chosen) - known.keys()
    if unknown:
        raise typer.BadParameter(f"there is no layout {', '.join(unknown)}; there are {', '.join(known)}")
    layouts: dict[str, Result] = {}
    described = machine.describe(folder)
    with tempfile.TemporaryDirectory(prefix="datastates-bench-", dir=folder) as inside:
        for name in chosen:
            layouts[name] = measure_layout(known[name], Path(inside), limit_seconds)
            bars = bars_of(layouts)
            if out is not None:  # each time: the whole takes long, and what is measured is measured
                _write({"machine": described, "layouts": layouts, "bars": [bar.plain() for bar in bars]}, out)
    _print(layouts)
    if bars:
        print_bars(bars)


def _write(results: Result, out: Path) -> None:
    import scale_plot  # here: matplotlib need not be installed where no picture is asked for

    out.write_text(json.dumps(results, indent=1) + "\n")
    scale_plot.draw(results, out.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(run)
