"""The command line of benchmarks.engine: what is measured, and what is printed and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from benchmarks import machine
from benchmarks.command import PATH, Result, benchmark_command, choose, measure_parts, scratch, write_results
from benchmarks.engine.caller import measure_objects, measure_start
from benchmarks.engine.rates import measure_sweep, measure_tiny, measure_write
from benchmarks.engine.saves import Sizes, quick
from benchmarks.engine.system import measure_interference, measure_memory
from benchmarks.rounds import Bar
from megatron_datastates.config import GIB, Options

PARTS: dict[str, Callable[[Path, Sizes], tuple[Result, list[Bar]]]] = {
    "write": measure_write,
    "start": measure_start,
    "tiny": measure_tiny,
    "memory": measure_memory,
    "interference": measure_interference,
    "objects": lambda _, sizes: measure_objects(sizes),
    "sweep": measure_sweep,
}


@benchmark_command
@click.option("--gib", default=4.0, help="Size of the large state, in GiB.")
@click.option("--repeats", default=5, help="Rounds of every comparison; medians are reported.")
@click.option("--only", multiple=True, help=f"A part to run: {', '.join(PARTS)}.")
@click.option(
    "--quick", "is_quick", is_flag=True, help="Tiny states, one round: seconds, and figures that mean little."
)
@click.option("--folder", type=PATH, default=".", help="Where to write; on the disk to be measured.")
@click.option("--out", type=PATH, help="Write the results to this JSON file, and a picture (.svg) beside it.")
def run(
    gib: float, repeats: int, only: Sequence[str], is_quick: bool, folder: Path, out: Path | None
) -> None:
    """Measures the native engine on this machine, next to what its disk and its memory can do.

    Contenders of a comparison take turns, several times, and medians are reported. Prints each part's
    results, and the bars that the project has set itself, met or not. Runs all parts but the sweep by
    default.

    \b
    Examples:
      python -m benchmarks.engine                  # about 6 minutes and 5 GiB of disk
      python -m benchmarks.engine --only write --gib 1 --repeats 3
      python -m benchmarks.engine --only sweep     # threads and slot sizes: the source of the defaults
      python -m benchmarks.engine --quick          # only to see that it works
      python -m benchmarks.engine --out benchmarks/results/engine.json
    """
    parts = choose(only, PARTS, [part for part in PARTS if part != "sweep"], "part")
    sizes = quick() if is_quick else Sizes(int(gib * GIB), repeats)
    results: Result = {
        "machine": machine.describe(folder),
        "gib": sizes.bytes / GIB,
        "repeats": sizes.repeats,
        "options": _defaults(),
    }
    with scratch(folder) as inside:
        measure_parts(results, parts, lambda part: PARTS[part](inside, sizes))
    write_results(results, out)
    if out is not None:
        from benchmarks.engine import picture  # here: matplotlib is needed for pictures only

        picture.draw(results, out.with_suffix(".svg"))


def _defaults() -> Result:
    """Returns the options that decide rates, as they are by default."""
    options = Options()
    names = ("slot_size", "copy_threads", "write_threads", "direct_io")
    return {name: getattr(options, name) for name in names}


if __name__ == "__main__":
    run()
