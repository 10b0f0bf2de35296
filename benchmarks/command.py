"""What the benchmarks' command lines share: choosing parts, scratch folders, notes on stderr, results' files.

What belongs here: typer and rich. What does not: measuring. benchmarks.gpu does without this module, because
the machines it runs on may have neither.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.rounds import Bar

Result = dict[str, Any]
notes = Console(stderr=True)


def run_command(command: Callable[..., None]) -> None:
    """Runs a function as the program's command line; its docstring is the text of --help."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    app()


def choose(
    only: Sequence[str] | None, known: Collection[str], default: Sequence[str], kind: str
) -> list[str]:
    """Returns the names given by --only, or the default ones.

    Raises:
        typer.BadParameter: a name is unknown.
    """
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown {kind} {', '.join(unknown)}; expected one of {', '.join(known)}")
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
