"""The command line of benchmarks.ablation: what is measured, and what is printed and written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from benchmarks import disk, machine
from benchmarks.ablation.parts import measure_coalescing, measure_lazy, measure_overlap
from benchmarks.ablation.samples import Sizes, quick
from benchmarks.command import PATH, Result, benchmark_command, choose, measure_parts, scratch, write_results
from benchmarks.rounds import Bar
from megatron_datastates.config import MIB

PARTS: dict[str, Callable[[Path, Sizes], Result]] = {
    "overlap": measure_overlap,
    "coalescing": measure_coalescing,
    "lazy": measure_lazy,
}


@benchmark_command
@click.option("--mib", default=512, help="Size of the large tensors, in MiB.")
@click.option("--repeats", default=7, help="Rounds of every comparison; medians are reported.")
@click.option("--only", multiple=True, help=f"A part to run: {', '.join(PARTS)}.")
@click.option(
    "--quick", "is_quick", is_flag=True, help="Tiny states, one round: seconds, and figures that mean little."
)
@click.option("--folder", type=PATH, default=".", help="Where to write; on the disk to be measured.")
@click.option("--out", type=PATH, help="Write the results to this JSON file, and a picture (.svg) beside it.")
def run(mib: int, repeats: int, only: Sequence[str], is_quick: bool, folder: Path, out: Path | None) -> None:
    """Measures what three ideas bring to a save, each against the same save without it.

    overlap: objects are serialized while tensors are staged and written. coalescing: many tiny tensors share
    a write. lazy: tensors are copied while the trainer runs. Contenders take turns, and medians are reported:
    how long the trainer was held, how long it took until the file was durable, and at what rate.

    \b
    Examples:
      python -m benchmarks.ablation                # about 3 minutes and 1 GiB of disk
      python -m benchmarks.ablation --only lazy --mib 256
      python -m benchmarks.ablation --quick        # only to see that it works
      python -m benchmarks.ablation --out benchmarks/results/ablation.json
    """
    parts = choose(only, PARTS, list(PARTS), "part")
    sizes = quick() if is_quick else Sizes(mib * MIB, repeats)
    results: Result = {
        "machine": machine.describe(folder),
        "repeats": sizes.repeats,
        "load_before": _load(),
    }

    def measure(part: str) -> tuple[Result, list[Bar]]:
        return PARTS[part](inside, sizes), []

    with scratch(folder) as inside:
        results["disk"] = disk.best_write_rate(inside, sizes.bytes)
        measure_parts(results, parts, measure)
        results["disk_after"] = disk.best_write_rate(inside, sizes.bytes)
    results["load_after"] = _load()
    write_results(results, out)
    if out is not None:
        from benchmarks.ablation import picture  # here: matplotlib is needed for pictures only

        picture.draw(results, out.with_suffix(".svg"))


def _load() -> list[float]:
    """Returns the number of processes that wanted to run, on average over 1, 5 and 15 minutes."""
    return [round(load, 1) for load in os.getloadavg()]


if __name__ == "__main__":
    run()
