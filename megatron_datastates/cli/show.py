"""datastates show."""

from __future__ import annotations

import fnmatch
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from megatron_datastates.cli.shared import (
    AnyFormat,
    AsJson,
    add_row,
    app,
    binary_size,
    cannot,
    print_json,
    print_table,
    progress_bar,
    say,
)
from megatron_datastates.convert.contents import Content, Statistics, contents, statistics
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.errors import DataStatesError, MissingKeyError

_STATISTICS = ("min", "max", "mean", "norm", "NaN", "Inf")


@app.command()
def show(
    directory: AnyFormat,
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="PATTERN", help="Only keys that match this shell pattern, such as 'decoder.*.weight'."
        ),
    ] = "*",
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", help="Also read the tensors: minimum, maximum, mean, norm, NaNs, infinities."
        ),
    ] = False,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="List optimizer state by parameter, not by bucket.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the tensors, objects and streams of a checkpoint.

    For each tensor: its key, dtype, shape, number of shards and of files, and size. An object has a key and
    a size, and so has a stream. Sizes are without compression.

    Statistics cover the finite elements and are computed in float64, where they may overflow to inf (null in
    JSON). The norm is the square root of the sum of squares.

    Exit codes: 0 listed; 2 no such checkpoint, or no key matches.

    \b
    Example: datastates show runs/gpt/iter_0001000 '*.layernorm*' --stats
    """
    try:
        source = open_source(directory)
        tensors = contents(source, pattern, optimizer=optimizer)
        objects = [] if optimizer else _objects(source, pattern)
        streams = [] if optimizer else _streams(source, pattern)
        if not tensors and not objects and not streams:
            raise MissingKeyError(
                f"no key in {directory} matches {pattern!r}: leave out the pattern to list all keys"
            )
        found = _statistics(tensors, quiet=as_json) if stats else _no_statistics(tensors)
    except (DataStatesError, OSError) as error:
        cannot(error)
    if as_json:
        rows = [_plain(content, numbers) for content, numbers in zip(tensors, found, strict=True)]
        print_json({"format": source.format, "tensors": rows, "objects": objects, "streams": streams})
    else:
        _print_tensors(tensors, found)
        _print_tail("object", objects)
        _print_tail("stream", streams)


def _objects(source: Source, pattern: str) -> list[dict[str, Any]]:
    keys = sorted(key for key in source.objects if fnmatch.fnmatchcase(key, pattern))
    if isinstance(source, DataStatesSource):
        found = {key: source.checkpoint.object_entry(key) for key in keys}
        return [{"key": key, "bytes": entry.bytes, "file": file} for key, (file, entry) in found.items()]
    return [{"key": key, "bytes": None, "file": None} for key in keys]


def _streams(source: Source, pattern: str) -> list[dict[str, Any]]:
    keys = sorted(key for key in source.streams if fnmatch.fnmatchcase(key, pattern))
    return [{"key": key, "bytes": source.stream_bytes(key)} for key in keys]


def _statistics(tensors: list[Content], quiet: bool) -> list[Statistics | None]:
    with progress_bar("reading", disable=quiet) as progress:
        task = progress.add_task("", total=sum(content.bytes for content in tensors))
        return [_statistics_of(content, progress, task) for content in tensors]


def _no_statistics(tensors: list[Content]) -> list[Statistics | None]:
    return [None for _ in tensors]


def _statistics_of(content: Content, progress: Progress, task: Any) -> Statistics | None:
    """Reads a tensor's statistics; returns None for a dtype that torch cannot convert to float64."""
    try:
        return statistics(content, lambda done: progress.advance(task, done))
    except NotImplementedError:
        return None


def _numbers(found: Statistics | None) -> dict[str, float | int | None]:
    if found is None:
        return dict.fromkeys(_STATISTICS)
    values = (found.minimum, found.maximum, found.mean, found.norm, found.nans, found.infinities)
    return dict(zip(_STATISTICS, values, strict=True))


def _plain(content: Content, found: Statistics | None) -> dict[str, Any]:
    row = {
        "key": content.key,
        "dtype": content.dtype,
        "shape": content.global_shape,
        "shards": len(content.offsets),
        "files": content.files,
        "bytes": content.bytes,
    }
    return row | ({name.lower(): value for name, value in _numbers(found).items()} if found else {})


def _print_tensors(tensors: list[Content], found: list[Statistics | None]) -> None:
    table = Table("tensor", "dtype", "shape", "shards", "files", "size", box=None)
    with_statistics = any(numbers is not None for numbers in found)
    for name in _STATISTICS if with_statistics else ():
        table.add_column(name, justify="right")
    for content, numbers in zip(tensors, found, strict=True):
        cells = [content.key, content.dtype, str(list(content.global_shape)), str(len(content.offsets)),
                 str(content.files or "-"), binary_size(content.bytes)]  # fmt: skip
        if with_statistics:
            cells += ["-" if value is None else f"{value:.6g}" for value in _numbers(numbers).values()]
        add_row(table, *cells)
    if tensors:
        print_table(table)
        say(f"{len(tensors)} tensors, {binary_size(sum(content.bytes for content in tensors))}")


def _print_tail(kind: str, rows: list[dict[str, Any]]) -> None:
    table = Table(kind, "size", box=None)
    for row in rows:
        add_row(table, row["key"], "-" if row["bytes"] is None else binary_size(row["bytes"]))
    if rows:
        print_table(table)
