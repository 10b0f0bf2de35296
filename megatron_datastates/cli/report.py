"""datastates report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    PATH,
    Table,
    argument,
    counted,
    json_option,
    note,
    print_json,
    reported_errors,
    say,
)
from megatron_datastates.errors import MissingPackageError, OptionError

if TYPE_CHECKING:
    from megatron_datastates.reports.advice import Advice
    from megatron_datastates.reports.reading import Load, Reports

_MOST_ROWS = 20  # in the terminal; the page has all
_MOST_LOADS = 5
_PAGE, _PICTURE = "report.html", "report.png"  # of --out
_MARKS = {"failure": "FAILED", "slow": "SLOW", "note": "note"}


@app.command()
@argument(
    "files",
    metavar="FILE...",
    type=PATH,
    nargs=-1,
    required=True,
    help="Files that --datastates-report-file has written.",
)
@click.option("--out", "folder", metavar="DIR", type=PATH, help="Write report.html and report.png here.")
@click.option("--html", "page", metavar="FILE", type=PATH, help="Write the page to this file.")
@click.option("--png", "picture", metavar="FILE", type=PATH, help="Write the picture to this file.")
@click.option("--last", metavar="N", type=click.IntRange(min=1), help="Look at the last N saves only.")
@json_option
def report(
    files: Sequence[Path],
    folder: Path | None,
    page: Path | None,
    picture: Path | None,
    last: int | None,
    as_json: bool,
) -> None:
    """Show what the saves of a run cost, and what to change.

    Prints a table and advice: failed saves, a disk that needs most of the interval, staging memory that is
    too small, a rank that is far slower than the others, waits of the optimizer, bytes that are copied at
    once, objects that take long. Of several files (runs that continue each other, or one for each rank), all
    saves count, and of each save the line of the lowest rank, which has times of all ranks.

    --out, --html and --png also draw every save against the clock, the iterations and the ranks. The page is
    one file that needs no network. The picture needs matplotlib. Existing files are replaced, but not
    those that are read. --out makes its
    directory; those of --html and --png must exist.

    --json prints the run in a few numbers instead, for scripts that watch it: how many saves failed, also
    since the last published one, when that one was published, how long saves held the trainer.

    Exit codes: 0 shown, whatever the saves were like; 2 it cannot be done.

    \b
    Examples:
        datastates report report.jsonl
        datastates report report.jsonl --last 50 --out pictures
        datastates report report.jsonl --json
        datastates report before.jsonl after.jsonl --html both.html
    """
    from megatron_datastates.reports.advice import advise
    from megatron_datastates.reports.reading import read_reports

    with reported_errors():
        if folder is not None and folder.exists() and not folder.is_dir():
            raise OptionError(f"--out {folder}: it is not a directory")
        made = None if folder is None else folder.absolute()
        for option, target in (("--html", page), ("--png", picture)):
            if target is not None and not target.parent.is_dir() and target.parent.absolute() != made:
                raise OptionError(f"{option} {target}: there is no directory {target.parent}")
        if picture is not None and picture.suffix.lower() != ".png":
            raise OptionError(f"--png {picture}: expected a name that ends in .png")
        found = read_reports(files)
        for option, target, name in (("--html", page, _PAGE), ("--png", picture, _PICTURE)):
            if target is None and folder is not None:
                option, target = "--out", folder / name
            if target is not None and target.is_dir():
                raise OptionError(f"{option} {target}: expected a file, found a directory")
            if target is not None and target.exists() and any(map(target.samefile, files)):
                raise OptionError(f"{option} {target}: it is one of the files that are read: choose another")
        left_out = len(found.saves) - last if last is not None else 0
        if left_out > 0:
            found.saves = found.saves[left_out:]
            began = found.saves[0].started_at
            found.skips = [skip for skip in found.skips if skip.skipped_at >= began]
        advice = advise(found.saves, found.skips)
        if not as_json:
            _print(found, advice)
        written = _write(files, found, advice, folder, page, picture)
        if as_json:  # last: if the call fails, it prints none
            print_json(_as_json(found, advice))
        elif written:
            say()
            for path in written:
                say(f"wrote {path}")


def _as_json(found: Reports, advice: list[Advice]) -> dict[str, Any]:
    from megatron_datastates.reports.summary import summary

    listed = [dataclasses.asdict(one) for one in advice]
    return summary(found.saves, found.skips) | {"advice": listed, "notes": found.notes}


def _print(found: Reports, advice: list[Advice]) -> None:
    from megatron_datastates.reports.advice import milliseconds
    from megatron_datastates.reports.table import COLUMNS, LEGEND, SHORT, row

    shown = found.saves[-_MOST_ROWS:]
    table = Table(*(f">{column}" for column in SHORT))
    for save in shown:
        cells = dict(zip(COLUMNS, row(save), strict=True))
        table.add(*(cells[column] for column in SHORT))
    if len(shown) < len(found.saves):
        say(f"the last {len(shown)} of {len(found.saves)} saves:")
    table.print()
    say(f"({LEGEND}; a page, --html FILE, has all columns, such as durable)")
    if len(found.loads) > _MOST_LOADS:
        say(f"the last {_MOST_LOADS} of {len(found.loads)} loads:")
    for load in found.loads[-_MOST_LOADS:]:
        what = "a checkpoint" if load.iteration is None else f"iteration {load.iteration}"
        took = milliseconds(load.total_ms)
        if load.state == "loaded":
            say(f"loaded {what} in {took}{_longest(load)}")
        else:
            reason = (load.error or "without a reason").strip().split("\n")[0]
            say(f"loading {what} failed after {took}: {reason}")
    for one in advice:
        say()
        say(f"{_MARKS[one.level]}: {one.title}")
        say(f"    {one.text}")
    for text in found.notes:
        note(text)


def _longest(load: Load) -> str:
    """Returns what took longest in a load, and on which rank, if that is known."""
    from megatron_datastates.reports.advice import milliseconds

    if not load.longest:
        return ""
    part, longest = max(load.longest.items(), key=lambda one: one[1].most)
    return f" (longest: {part} on rank {longest.slowest_rank}, {milliseconds(longest.most)})"


def _write(
    files: Sequence[Path],
    found: Reports,
    advice: list[Advice],
    folder: Path | None,
    page: Path | None,
    picture: Path | None,
) -> list[Path]:
    """Writes what was asked for, and returns where.

    Without matplotlib, the page has no picture, and --png is an error.
    """
    from megatron_datastates.convert.sinks.target import replace_on_exit
    from megatron_datastates.reports.page import make_page
    from megatron_datastates.reports.picture import draw, svg_text, write_png

    if folder is not None:
        page = page or folder / _PAGE
    wanted = picture or (folder / _PICTURE if folder is not None else None)
    if page is None and wanted is None:
        return []
    title = f"{counted(len(found.saves), 'save')}: {', '.join(path.name for path in files)}"
    figure: Any = None
    missing = ""
    try:
        figure = draw(found.saves, title)
    except MissingPackageError as error:
        if picture is not None:
            raise
        missing = str(error)
        note(missing)
    written = []
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    if wanted is not None and figure is not None:
        with replace_on_exit(wanted) as temporary:
            write_png(figure, temporary)
        written.append(wanted)
    if page is not None:
        svg = svg_text(figure, found.saves) if figure is not None else ""
        text = make_page(title, found, advice, svg, missing)
        with replace_on_exit(page) as temporary:
            temporary.write_text(text, "utf-8", "backslashreplace")
        written.append(page)
    return written
