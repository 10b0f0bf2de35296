"""The parts that all sub-commands share: common parameters, output, and exit codes.

Exit codes: 0 success, 1 the checkpoint is faulty or differs, 2 the command cannot be carried out. With 2,
nothing was written, and one line on standard error says why. Whatever the command, damaged bytes are 1, and
files that are missing or cannot be read are 2; `verify` alone calls a missing or truncated file faulty.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import click

from megatron_datastates.config import MIB
from megatron_datastates.convert.limits import LEAST_MEMORY_BYTES
from megatron_datastates.errors import (
    DataStatesError,
    NotACheckpointError,
    OptionError,
    describe_error,
    is_damage,
    printable,
)
from megatron_datastates.files import is_object, path_of, require_utf8
from megatron_datastates.format.directory import BACKEND, TORCH_DIST
from megatron_datastates.option_text import parse_bytes
from megatron_datastates.pipeline.runs.run_folders import choose_checkpoint

if TYPE_CHECKING:
    from rich.progress import Progress

Command = TypeVar("Command", bound=Callable[..., Any])
_GROUPS = {"tensor": "TP", "pipeline": "PP", "data": "DP", "context": "CP", "expert": "EP"}


def argument(name: str, *, help: str, **attributes: Any) -> Callable[[Command], Command]:
    """Declares a positional argument. Before release 8.5 of click, --help only names it."""
    if "help" in inspect.signature(click.Argument).parameters:
        attributes["help"] = help
    return click.argument(name, **attributes)


class _CheckedPath(click.Path):
    """A path in a file system or an object store (`msc://PROFILE/PATH`).

    Ends the command with exit code 2 if it is a URL of another kind, or not as expected.

    Args:
        is_local: it has to be in a file system.
        is_read: it has to be valid UTF-8.
    """

    def __init__(self, *, is_local: bool = False, is_read: bool = False) -> None:
        super().__init__(path_type=Path)
        self._is_local, self._is_read = is_local, is_read

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        super().convert(value, param, ctx)  # fails if it is there and cannot be read
        if ctx is not None and ctx.resilient_parsing:  # it is being completed
            return Path(value)
        with reported_errors():
            path = path_of(value)
            if self._is_local and is_object(path):
                raise OptionError(f"{path} is in an object store: expected a path in a file system")
            if self._is_read:
                require_utf8(path)
        if is_object(path):
            # What the client logs of its attempts is not for standard error, where errors are one line.
            logging.getLogger("multistorageclient").addHandler(logging.NullHandler())
        return path


class Size(click.ParamType):  # type: ignore[type-arg] # generic since release 8.5 of click
    """A size such as `512MiB`, in bytes."""

    name = "size"

    def __init__(self, least_bytes: int) -> None:
        self.least_bytes = least_bytes

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            size = parse_bytes(value)
        except ValueError as error:
            self.fail(f"{value}: {error}", param, ctx)
        if size < self.least_bytes:
            least = f"{self.least_bytes // MIB}MiB" if self.least_bytes >= MIB else f"{self.least_bytes}B"
            self.fail(f"{value}: expected at least {least}", param, ctx)
        return size


FORMATS = click.Choice([BACKEND, TORCH_DIST])  # that checkpoints are written in

PATH = _CheckedPath(is_local=True)
PLACED = _CheckedPath()
READABLE = _CheckedPath(is_read=True)
LOCAL_READABLE = _CheckedPath(is_local=True, is_read=True)

_OF_A_RUN = "The directory of a run stands for the checkpoint that its tracker names."
directory_argument = argument(
    "directory",
    metavar="CHECKPOINT",
    type=READABLE,
    help=f"Directory of a datastates checkpoint, such as runs/gpt/iter_0001000. {_OF_A_RUN}",
)
any_format_argument = argument(
    "directory",
    metavar="CHECKPOINT",
    type=READABLE,
    help=f"Directory of a checkpoint, such as runs/gpt/iter_0001000; its format is detected. {_OF_A_RUN}",
)
run_argument = argument(
    "root", metavar="RUN", type=PLACED, help="Directory of a training run, as given to --save."
)
iteration_option = click.option(
    "--iteration",
    metavar="N",
    type=click.IntRange(min=0),
    help="If a run is given: use this iteration instead of the one that its tracker names.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
keys_option = click.option(
    "--keys",
    metavar="PATTERN",
    multiple=True,
    help="Only tensors whose key matches this shell pattern (*, ?, [..]), as stored or with a layer's "
    "number (decoder.layers.3.*); may be given several times.",
)
MEMORY = Size(MIB)  # with less, a tensor would be read in a vast number of tiny pieces
memory_option = click.option(
    "--memory",
    metavar="SIZE",
    type=MEMORY,
    default="1GiB",
    help="Tensor data to hold in memory at a time, at least 1MiB.",
)
conversion_memory_option = click.option(
    "--memory",
    metavar="SIZE",
    type=Size(LEAST_MEMORY_BYTES),
    default="2GiB",
    help=f"Memory for data in each process, at least {LEAST_MEMORY_BYTES // MIB}MiB.",
)


def progress_bar(verb: str, disable: bool = False) -> Progress:
    """Makes the progress bar of a long job: bytes, rate, time left.

    It is shown on standard error, and only if that is a terminal.
    """
    # Imported here, as help and listings need no bar: rich takes a tenth of a second.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    notes = Console(stderr=True, markup=False, emoji=False, highlight=False)
    bars = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    disable = disable or not notes.is_terminal
    notes.quiet = disable  # before rich 14.3, a disabled bar ended with an empty line
    return Progress(verb, *bars, console=notes, transient=True, disable=disable)


@contextlib.contextmanager
def advancing(verb: str, total_bytes: int, disable: bool = False) -> Iterator[Callable[[int], None]]:
    """Shows the progress bar of a job of known size; yields what is called with how much more is done."""
    with progress_bar(verb, disable) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda done: bar.advance(task, done)


def say(text: str = "", hanging: int = 4) -> None:
    """Prints text to standard output; control characters become escapes. In a terminal it is folded.

    Args:
        hanging: spaces before all lines but the first, where a line of the text is folded.
    """
    _print(_folded(printable(text, keep="\n"), sys.stdout, hanging))


def say_as_is(text: str) -> None:
    """Prints text that is data, or to be copied: as `say`, and never folded."""
    _print(printable(text, keep="\n"))


def _print(text: str) -> None:
    try:
        print(text)
    except OSError as error:  # else a message would not say what could not be written
        error.filename = "standard output"
        raise


def say_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Prints names and texts, which are folded beside the names."""
    indent = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        say(name.ljust(indent) + text, indent)


def note(text: str) -> None:
    """Prints one line to standard error; control characters become escapes. In a terminal it is folded."""
    print(_folded(printable(text), sys.stderr, 4), file=sys.stderr)


def _folded(text: str, stream: TextIO, hanging: int) -> str:
    """Ends the lines of a text for a terminal between words: a path or a key stays whole, to be copied."""
    columns = _columns(stream)
    if columns is None:
        return text
    wrapper = textwrap.TextWrapper(
        columns,
        subsequent_indent=" " * hanging,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def _columns(stream: TextIO) -> int | None:
    """Returns the width of a terminal; None for anything else, where lines are for programs."""
    if not stream.isatty():
        return None
    with contextlib.suppress(OSError, ValueError):  # a wrong COLUMNS, or a terminal without a size
        given = int(os.environ.get("COLUMNS", 0))
        return given if given > 0 else os.get_terminal_size(stream.fileno()).columns or 80
    return 80


class Table:
    """Columns of text as wide as their cells, two spaces apart. Nothing is cut.

    In a terminal, a row that is too long goes on in further lines, before cells that would not fit: a name
    or a key, which comes last, stays whole and can be copied. Elsewhere each row is one line.

    Args:
        columns: their names, for a line above; those that begin with `>` are aligned to the right.
    """

    def __init__(self, *columns: str) -> None:
        self._right = [name.startswith(">") for name in columns]
        self._rows = [[name.removeprefix(">") for name in columns]]

    def add(self, *cells: str) -> None:
        """Adds a row; control characters become escapes."""
        self._rows.append([printable(cell) for cell in cells])

    def print(self) -> None:
        columns = _columns(sys.stdout) or sys.maxsize
        # A cell that takes half of a terminal does not push those beside and below it out of it.
        widths = [
            max((len(cell) for cell in column if 2 * len(cell) <= columns), default=0)
            for column in zip(*self._rows, strict=True)
        ]
        for row in self._rows:
            cells = [
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, self._right, strict=True)
            ]
            _print("\n".join(_row_lines(cells, columns)))


def _row_lines(cells: Sequence[str], columns: int) -> list[str]:
    lines = [cells[0]]
    for cell in cells[1:]:
        if len(lines[-1]) + 2 + len(cell.rstrip()) <= columns:
            lines[-1] += f"  {cell}"
        else:
            lines.append(f"    {cell.strip()}")  # a key may have spaces, and is to be copied whole
    return [line.rstrip() for line in lines]


def print_json(value: Any) -> None:
    """Prints a value as strict JSON, in which NaN and infinity are null.

    Raises:
        RecursionError: the value is nested too deeply, or contains itself.
    """
    _print(json.dumps(_strict(value)))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parallelism_text(sizes: Mapping[str, int]) -> str:
    """Formats sizes of parallel groups, such as `TP8 PP4`; those of one rank are left out."""
    return " ".join(f"{_GROUPS.get(name, name)}{size}" for name, size in sizes.items() if size > 1)


def counted(count: int, noun: str) -> str:
    """Formats a number of things: `1 tensor`, `2 tensors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def require_directory(path: Path, wanted: str = "the directory of a run") -> None:
    """Raises NotACheckpointError, which asks for `wanted`, if a path of a file system is no directory."""
    if not is_object(path) and not path.is_dir():
        fault = "is not a directory" if path.exists() else "does not exist"
        raise NotACheckpointError(f"{path} {fault}: give {wanted}")


def require_plot(plot: Path) -> None:
    """Checks --plot, before work that may take an hour. Raises DataStatesError, or a store's OSError."""
    from megatron_datastates.convert.pictures import require_plotting
    from megatron_datastates.convert.sinks.target import refuse_target

    if plot.suffix.lower() != ".png":
        raise OptionError(f"--plot {plot}: expected a name that ends in .png")
    refuse_target(plot)
    require_plotting()


def checkpoint_of(directory: Path, iteration: int | None) -> Path:
    """Returns the checkpoint that an argument stands for; says on standard error which one of a run it is.

    Raises:
        OptionError, NotACheckpointError, StorageError: see choose_checkpoint.
    """
    # Said at once: to open a checkpoint, some commands import torch.
    require_directory(directory, "a checkpoint, or the directory of a run")
    found = choose_checkpoint(directory, iteration)
    if found.how:
        note(f"datastates: {found.how}")
    return found.directory


def cannot(error: Exception, code: int | None = None) -> NoReturn:
    """Ends the command with an exit code, after one line on standard error that says why.

    Args:
        code: by default 1 if the error says that a checkpoint is damaged, and else 2.

    Raises:
        BrokenPipeError: that is the error; entry.py ends the command.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    note(f"datastates: {describe_error(error)}")
    raise click.exceptions.Exit((1 if is_damage(error) else 2) if code is None else code)


@contextlib.contextmanager
def reported_errors(code: int | None = None) -> Iterator[None]:
    """Ends the command as `cannot` does if the body raises one of these errors."""
    try:
        yield
    except (DataStatesError, OSError) as error:
        cannot(error, code)
