"""What the benchmarks' command lines share: choosing parts, scratch folders, notes on stderr, results' files.

What belongs here: click and rich. What does not: measuring. benchmarks.gpu does without this module, because
the machines it runs on may have neither.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.rounds import Bar

Result = dict[str, Any]
notes = Console(stderr=True)

# Makes a function a command line; its docstring is the text of --help.
benchmark_command = click.command(context_settings={"show_default": True})
PATH = click.Path(path_type=Path)


def choose(only: Sequence[str], known: Collection[str], default: Sequence[str], kind: str) -> list[str]:
    """Returns the names given by --only, or the default ones.

    Raises:
        click.BadParameter: a name is unknown.
    """
    unknown = [name for name in only if name not in known]
    if unknown:
        raise click.BadParameter(f"unknown {kind} {'; '.join(unknown)}: expected one of: {'; '.join(known)}")
    return list(only or default)


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yields a new folder inside `folder`, and removes it with all its contents at the end."""
    with tempfile.TemporaryDirectory(prefix="datastates-bench-", dir=folder) as made:
        yield Path(made)


def measure_parts(
    results: Result, parts: Sequence[str], measure: Callable[[str], tuple[Result, list[Bar]]]
) -> None:
    """Adds the results of each part to `results`, and the bars of all parts; prints both."""
    bars: list[Bar] = []
    for part in parts:
        with notes.status(f"measuring: {part}"):
            results[part], found = measure(part)
        bars += found
        notes.print_json(json.dumps({part: results[part]}))
    results["bars"] = [bar.plain() for bar in bars]
    print_bars(bars)


def print_bars(bars: Sequence[Bar]) -> None:
    """Prints a table of bars and whether each is met; nothing if there are none."""
    if not bars:
        return
    table = Table("figure", "measured", "bar", "")
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        verdict = "[green]met[/]" if bar.met else "[red]not met[/]"
        table.add_row(bar.name, f"{bar.value:.3g} {bar.unit}", f"{sign} {bar.limit:g} {bar.unit}", verdict)
    Console().print(table)


def write_results(results: Result, out: Path | None) -> None:
    """Writes the results to a JSON file, if one was asked for."""
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


def resume(out: Path | None, described: Result) -> Result:
    """Returns the results of an earlier run that --out names, to be completed; or new ones, without parts.

    Raises:
        click.BadParameter: they are of another machine, or of a state of another size.
    """
    if out is None or not out.exists():
        return described | {"parts": {}}
    found: Result = json.loads(out.read_text())
    for name, value in described.items():
        old, new = (_comparable(one) for one in (found.get(name), value))
        if old != new:
            raise click.BadParameter(
                f"{out} has results with another {name} ({old}, now {new}); write to another file"
            )
    return found


def load_average() -> float:
    """Returns the average number of running processes of the last five minutes."""
    return round(os.getloadavg()[1], 1)


_CHANGING = ("date", "disk_free_gib")


def _comparable(described: Any) -> Any:
    """Returns a description without what changes from hour to hour."""
    if not isinstance(described, dict):
        return described
    return {name: value for name, value in described.items() if name not in _CHANGING}


def machine_line(machine: Result, part: Result) -> str:
    """Returns a sentence that describes the machine and the versions of a part's results."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, kernel "
        f"{machine['kernel']}, {machine['file_system']}; load average {part['load_average']}; "
        f"Python {machine['python']}, {versions}."
    )


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
