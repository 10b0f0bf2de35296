"""datastates show."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    Table,
    advancing,
    any_format_argument,
    argument,
    checkpoint_of,
    counted,
    iteration_option,
    json_option,
    print_json,
    reported_errors,
    say,
    say_rows,
)
from megatron_datastates.convert.open import open_source
from megatron_datastates.errors import MissingKeyError
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    from megatron_datastates.convert.contents import Content
    from megatron_datastates.convert.sources.source import Source
    from megatron_datastates.convert.statistics import Statistics

_STATISTICS = ("min", "max", "mean", "norm", "NaN", "Inf")
_EVERYTHING = "*"


@app.command()
@any_format_argument
@argument(
    "pattern",
    default=_EVERYTHING,
    help="Only keys that match this shell pattern, such as 'decoder.*.weight', or the names of a "
    "layer's tensors, such as 'decoder.layers.3.*'.",
)
@click.option(
    "--stats", is_flag=True, help="Also read the tensors: minimum, maximum, mean, norm, NaNs, infinities."
)
@click.option("--optimizer", is_flag=True, help="List optimizer state by parameter, not by bucket.")
@iteration_option
@json_option
def show(
    directory: Path, pattern: str, stats: bool, optimizer: bool, iteration: int | None, as_json: bool
) -> None:
    """Summarize a checkpoint, and list what is in it.

    For each tensor: its dtype, shape, number of shards and of files, size, and key. An object has a key and
    a size, and so has a stream. Sizes are without compression. With a pattern, there is no summary.

    Statistics cover the finite elements and are computed in float64, where they may overflow to inf (null in
    JSON). The norm is the square root of the sum of squares.

    Exit codes: 0 listed; 1 the checkpoint is damaged; 2 no such checkpoint, no key matches, or a file is
    missing or unreadable, or a data file truncated.

    \b
    Example: datastates show runs/gpt/iter_0001000 '*norm*' --stats
    """
    with reported_errors():
        path = checkpoint_of(directory, iteration)  # before the imports: a wrong path is said at once
        from megatron_datastates.convert.contents import contents

        source = open_source(path)
        if stats:
            source.note_files()
        tensors = contents(source, pattern, optimizer=optimizer)
        objects = [] if optimizer else _objects(source, pattern)
        streams = [] if optimizer else _streams(source, pattern)
        if not tensors and not objects and not streams:
            raise MissingKeyError(
                f"{path} holds no tensors, objects or streams"
                if pattern == _EVERYTHING
                else f"no key in {path} matches {pattern!r}: leave out the pattern to list all keys"
            )
        found: list[Statistics | None] = [None] * len(tensors)
        if stats:
            found = _statistics(tensors, quiet=as_json)
            source.require_unchanged()
        if pattern == _EVERYTHING and not as_json:
            _print_summary(path, source)
    if as_json:
        rows = [_plain(content, numbers) for content, numbers in zip(tensors, found, strict=True)]
        found_in = {"path": str(path), "format": source.format}
        print_json(found_in | {"tensors": rows, "objects": objects, "streams": streams})
    else:
        _print_tensors(tensors, found, stats)
        _print_tail("object", objects)
        _print_tail("stream", streams)


def _print_summary(path: Path, source: Source) -> None:
    from megatron_datastates.cli.summary import summary

    say_rows(summary(path, source))
    say()


def _objects(source: Source, pattern: str) -> list[dict[str, Any]]:
    keys = sorted(key for key in source.objects if fnmatch.fnmatchcase(key, pattern))
    return [{"key": key, "bytes": source.object_bytes(key), "file": source.object_file(key)} for key in keys]


def _streams(source: Source, pattern: str) -> list[dict[str, Any]]:
    keys = sorted(key for key in source.streams if fnmatch.fnmatchcase(key, pattern))
    return [{"key": key, "bytes": source.stream_bytes(key)} for key in keys]


def _statistics(tensors: list[Content], quiet: bool) -> list[Statistics | None]:
    from megatron_datastates.convert.statistics import statistics

    with advancing("reading", sum(content.bytes for content in tensors), disable=quiet) as progress:
        return statistics(tensors, progress)


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


def _print_tensors(tensors: list[Content], found: list[Statistics | None], stats: bool) -> None:
    """Prints a table whose last column is the key: it may be long, and a terminal copies it whole."""
    is_odd = any(numbers is not None and numbers.nans + numbers.infinities for numbers in found)
    statistics = _STATISTICS if is_odd else _STATISTICS[:-2]  # without NaN and Inf
    columns = statistics if stats else ("shards", "files", "size")
    table = Table("dtype", "shape", *(f">{name}" for name in columns), "tensor")
    for content, numbers in zip(tensors, found, strict=True):
        if stats:
            values = _numbers(numbers)
            cells = ["-" if values[name] is None else f"{values[name]:.6g}" for name in statistics]
        else:
            cells = [str(len(content.offsets)), str(content.files or "-"), size_text(content.bytes)]
        table.add(content.dtype, str(list(content.global_shape)), *cells, content.key)
    if tensors:
        table.print()
        say(f"{counted(len(tensors), 'tensor')}, {size_text(sum(content.bytes for content in tensors))}")


def _print_tail(kind: str, rows: list[dict[str, Any]]) -> None:
    table = Table(">size", kind)
    for row in rows:
        table.add(size_text(row["bytes"]), row["key"])
    if rows:
        table.print()
