"""Compares two source trees of this project: the same benchmark, run in each of them in turns.

Each run is a process of its own, with the modules of its tree; both use this interpreter's packages. The
other tree is a checkout whose native module was built in place (`git worktree add ../old REVISION`, then
`python setup.py build_ext --inplace` in it).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.command import Result, notes, run_command, write_results
from benchmarks.rounds import median, spread

_HERE = Path(__file__).parents[1]
_NOT_FIGURES = ("machine", "bars", "options", "date")


def figures(results: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers in a results' file, each with the names that lead to it; no spreads."""
    if isinstance(results, dict):
        for name, value in results.items():
            if name not in _NOT_FIGURES and not name.startswith("spread"):
                yield from figures(value, f"{path} / {name}" if path else name)
    elif isinstance(results, int | float) and not isinstance(results, bool):
        yield path, float(results)


def compare(before: list[dict[str, float]], after: list[dict[str, float]]) -> Result:
    """Returns the medians, spreads and ratios of the figures that differ and that every run has."""
    common = [name for name in before[0] if all(name in run for run in (*before, *after))]
    found: Result = {}
    for name in common:
        old, new = [run[name] for run in before], [run[name] for run in after]
        if set(old) | set(new) == {old[0]} or not median(old):
            continue  # a size, not a measurement
        found[name] = {
            "before": median(old),
            "after": median(new),
            "ratio": round(median(new) / median(old), 3),
            "spread": {"before": spread(old), "after": spread(new)},
        }
    return found


def _run(tree: Path, benchmark: str, arguments: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "results.json")
        command = [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments, "--out", str(out)]
        done = subprocess.run(
            command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True
        )
        if done.returncode:
            raise typer.BadParameter(f"the benchmark failed in {tree}:\n{done.stderr[-2000:]}")
        return dict(figures(json.loads(out.read_text())))


def _revision(tree: Path) -> str:
    git = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def run(
    other: Annotated[Path, typer.Argument(help="The tree to compare with, built.", exists=True)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed to the benchmark, after --.")] = None,
    benchmark: Annotated[str, typer.Option(help="engine, load, ablation, compression.")] = "engine",
    rounds: Annotated[int, typer.Option(help="Runs of each tree; medians are reported.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    r"""Compares this tree with another one by running the same benchmark in both, in turns.

    \b
    Examples:
      python -m benchmarks.revisions ../old -- --only start --only tiny --gib 1 --repeats 3
      python -m benchmarks.revisions ../old --benchmark load --rounds 3 -- --only plain --gib 0.5
    """
    runs: dict[Path, list[dict[str, float]]] = {other.resolve(): [], _HERE: []}
    for number in range(rounds):
        trees = list(runs) if number % 2 == 0 else list(runs)[::-1]
        for tree in trees:
            with notes.status(f"round {number + 1} of {rounds}: {tree}"):
                runs[tree].append(_run(tree, benchmark, list(arguments or ())))
    before, after = runs.values()
    found = compare(before, after)
    table = Table("figure", "before", "after", "after/before")
    for name, figure in found.items():
        table.add_row(name, f"{figure['before']:.4g}", f"{figure['after']:.4g}", f"{figure['ratio']:.3f}")
    Console().print(table)
    results: Result = {
        "machine": machine.describe(Path()),
        "before": _revision(other),
        "after": _revision(_HERE),
        "benchmark": [benchmark, *(arguments or ())],
        "rounds": rounds,
        "figures": found,
    }
    write_results(results, out)


if __name__ == "__main__":
    run_command(run)
