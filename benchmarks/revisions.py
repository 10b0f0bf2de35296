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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.command import PATH, Result, benchmark_command, notes, write_results
from benchmarks.rounds import median, spread

_HERE = Path(__file__).parents[1]
_NOT_FIGURES = ("machine", "bars", "options", "date")


def figures(results: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers in a results' file, each with the names that lead to it; no spreads."""
    if isinstance(results, dict):
        for name, value in results.items():
            if name not in _NOT_FIGURES and "spread" not in name:
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
            raise click.BadParameter(f"the benchmark failed in {tree}:\n{done.stderr[-2000:]}")
        return dict(figures(json.loads(out.read_text())))


def _require_tree(tree: Path) -> None:
    """Raises BadParameter for a folder without this project: an installed one would be measured."""
    for package in ("benchmarks", "megatron_datastates"):
        if not (tree / package / "__init__.py").is_file():
            raise click.BadParameter(f"{tree} has no package {package}: expected a checkout of this project")


def _revision(tree: Path) -> str:
    git = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


@benchmark_command
@click.argument(
    "other", type=click.Path(exists=True, path_type=Path), help="The tree to compare with, built."
)
@click.argument("arguments", nargs=-1, help="Passed to the benchmark, after --.")
@click.option("--benchmark", default="engine", help="engine, load, ablation, compression.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, help="Runs of each tree; medians are reported."
)
@click.option("--out", type=PATH, help="Write the results to this JSON file.")
def run(other: Path, arguments: Sequence[str], benchmark: str, rounds: int, out: Path | None) -> None:
    """Compares this tree with another one by running the same benchmark in both, in turns.

    \b
    Examples:
      python -m benchmarks.revisions ../old -- --only start --only tiny --gib 1 --repeats 3
      python -m benchmarks.revisions ../old --benchmark load --rounds 3 -- --only plain --gib 0.5
    """
    _require_tree(other)
    before, after = list[dict[str, float]](), list[dict[str, float]]()
    pairs = [(other.resolve(), before), (_HERE, after)]  # which may be one tree: then ratios are noise
    for number in range(rounds):
        for tree, runs in pairs if number % 2 == 0 else pairs[::-1]:
            with notes.status(f"round {number + 1} of {rounds}: {tree}"):
                runs.append(_run(tree, benchmark, list(arguments or ())))
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
    run()
