"""datastates verify."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    READABLE,
    argument,
    cannot,
    checkpoint_of,
    counted,
    iteration_option,
    json_option,
    note,
    print_json,
    progress_bar,
    reported_errors,
    require_directory,
    say,
)
from megatron_datastates.convert.open import open_source
from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    FormatError,
    NotACheckpointError,
    OptionError,
    StorageError,
    UntrustedClassError,
    describe_error,
    some_of,
)
from megatron_datastates.files import is_object, is_out_of_reach, names_in
from megatron_datastates.pipeline.runs.run_folders import (
    checkpoint_directories,
    is_run,
    non_persistent_in,
    why_no_run,
)
from megatron_datastates.pipeline.runs.runs import is_published, require_readable
from megatron_datastates.pipeline.runs.tracker import tracked_name
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    from megatron_datastates.pipeline.upkeep.verify import Verdict

_NOT_READ = ", damage within tensors and objects not looked for (--quick)"


@app.command()
@argument(
    "directories",
    metavar="CHECKPOINT...",
    type=READABLE,
    nargs=-1,
    required=True,
    help="Directories of checkpoints of any format, such as runs/gpt/iter_*. Of a run, the "
    "checkpoint that its tracker names.",
)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="The directories are runs: check all their checkpoints. Empty directories are none, unless the "
    "tracker names one.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Check the structure only: files, sizes, index, footers, and the optimizer's map. Damage within "
    "tensors and objects is not looked for.",
)
@iteration_option
@json_option
def verify(
    directories: Sequence[Path], every: bool, quick: bool, iteration: int | None, as_json: bool
) -> None:
    """Check that checkpoints are complete and undamaged.

    Checks every checksum, every extent, every element and every object, and lists all faults. In torch_dist,
    tensors and objects have checksums, but the index, .metadata, has none. It is checked for consistency with
    itself and with the files, as strictly as torch checks it; the verdict says that this can miss changes.
    If one of several checkpoints cannot be checked, the others are still checked.

    Exit codes: 0 all are good; 1 some are faulty; 2 some cannot be checked, or not completely, and none is
    faulty: no such directory, no checkpoint in it or an unfinished one, permissions, or an object store that
    does not answer or refuses its credentials.

    \b
    Example: datastates verify runs/gpt/iter_0001000

    \b
    Example: datastates verify --all runs/gpt
    """
    with reported_errors():
        paths = _checkpoints(directories, every, iteration)
    (path, trouble), *others = paths
    if not others and (trouble is not None or not every):
        verdict = trouble or _checked(path, quick)
        if isinstance(verdict, Exception):
            cannot(verdict)
        verdicts: list[Verdict | Exception] = [verdict]
        if as_json:
            print_json({"path": str(path)} | _plain(verdict))
        else:
            _print_verdict(path, verdict, quick)
    else:
        verdicts = _check_all(paths, quick, as_json)
    raise click.exceptions.Exit(_code(verdicts))


def _checkpoints(
    directories: Sequence[Path], every: bool, iteration: int | None
) -> list[tuple[Path, Exception | None]]:
    """Returns the checkpoints that arguments stand for, each with why it cannot be checked, if so."""
    if every and iteration is not None:
        raise OptionError("--all and --iteration: choose one")
    found: list[tuple[Path, Exception | None]] = []
    for directory in directories:
        try:
            paths = _all_of_run(directory) if every else [checkpoint_of(directory, iteration)]
        except (DataStatesError, OSError) as error:
            found.append((directory, error))
        else:
            found += [(path, None) for path in paths]
            if iteration is None and paths != [directory]:  # it is a run
                _note_non_persistent(directory, every, directories)
    return found


def _note_non_persistent(run: Path, every: bool, checked: Sequence[Path]) -> None:
    """Says which non-persistent checkpoints of a run are not checked, though one may be resumed from."""
    try:
        other = non_persistent_in(run)
    except DataStatesError as error:
        note(f"datastates: not checked: {error}")
        return
    if other is not None and (other.is_resumed or every) and other.directory not in checked:
        resumed = ", which a run that resumes with --non-persistent-ckpt-type global loads" * other.is_resumed
        note(
            f"datastates: not checked: the non-persistent checkpoints in {other.directory}, up to iteration "
            f"{other.iteration}{resumed}: check with `datastates verify{' --all' * every} {other.directory}`"
        )


def _all_of_run(directory: Path) -> list[Path]:
    require_directory(directory)
    if not is_run(directory):
        raise NotACheckpointError(f"--all: {why_no_run(directory, 'leave --all out')}")
    tracked = tracked_name(directory)
    found = checkpoint_directories(directory)
    empty = [path for path in found if path.name != tracked and _is_empty(path)]
    if empty:
        names = some_of([path.name for path in empty], 3)
        note(f"datastates: not checked: {names}: empty, so no checkpoint: as a failed save leaves it")
    if len(empty) == len(found):
        raise NotACheckpointError(
            f"--all: {directory} holds no checkpoint: it has no directory iter_* with anything in it"
        )
    return [path for path in found if path not in empty]


def _is_empty(path: Path) -> bool:
    try:
        return not is_object(path) and not names_in(path)
    except OSError:
        return False


def _check_all(
    paths: list[tuple[Path, Exception | None]], quick: bool, as_json: bool
) -> list[Verdict | Exception]:
    """Checks several checkpoints, and prints each verdict when it is known, or all of them as JSON."""
    verdicts, rows = [], []
    for path, trouble in paths:
        verdict = trouble or _checked(path, quick)
        verdicts.append(verdict)
        if as_json:
            rows.append({"path": str(path)} | _plain(verdict))
        elif isinstance(verdict, Exception):
            note(f"{path}: cannot be checked: {describe_error(verdict)}")
        else:
            _print_verdict(path, verdict, quick)
    if as_json:
        print_json(rows)
        return verdicts
    good = sum(_plain(verdict)["good"] is True for verdict in verdicts)
    faulty = sum(_plain(verdict)["good"] is False for verdict in verdicts)
    failed = len(verdicts) - good - faulty
    unchecked = f", {failed} could not be checked" if failed else ""
    unread = _NOT_READ if quick else ""
    say(f"{counted(len(paths), 'checkpoint')}: {good} good, {faulty} faulty{unchecked}{unread}")
    return verdicts


def _code(verdicts: list[Verdict | Exception]) -> int:
    if any(not isinstance(verdict, Exception) and verdict.faults for verdict in verdicts):
        return 1
    return 2 if any(isinstance(verdict, Exception) or verdict.unread for verdict in verdicts) else 0


def _plain(verdict: Verdict | Exception) -> dict[str, Any]:
    if isinstance(verdict, Exception):
        return {"good": None, "error": describe_error(verdict)}
    good = None if verdict.unread and not verdict.faults else verdict.good
    return dataclasses.asdict(verdict) | {"good": good}


def _checked(directory: Path, quick: bool) -> Verdict | Exception:
    """Returns the verdict, or why there is none."""
    from megatron_datastates.convert.integrity import data_bytes, verify_source
    from megatron_datastates.pipeline.loading.load import Checkpoint
    from megatron_datastates.pipeline.upkeep.verify import Verdict
    from megatron_datastates.pipeline.upkeep.verify import verify as verify_checkpoint

    try:
        require_readable(directory)  # what is not readable is not called faulty
        with progress_bar("verifying", disable=quick) as progress:
            task = progress.add_task("")

            def advance(done: int) -> None:
                progress.advance(task, done)

            # A manifest makes it ours, whatever other files say: that they do is a fault.
            source = None if is_published(directory) else open_source(directory)
            if source is None or source.checkpoint is not None:
                files = Checkpoint.open(directory).manifest.files
                progress.update(task, total=sum(file.footer_offset for file in files))
                return verify_checkpoint(directory, quick=quick, progress=advance)
            progress.update(task, total=data_bytes(source))
            return verify_source(source, quick=quick, progress=advance)
    except (FormatError, CorruptDataError, StorageError) as error:
        if isinstance(error, UntrustedClassError) or is_out_of_reach(error):
            return error
        return Verdict(faults=[str(error)])  # so damaged that it cannot be opened
    except (DataStatesError, OSError) as error:
        return error


def _print_verdict(directory: Path, verdict: Verdict, quick: bool) -> None:
    for fault in verdict.faults:
        say(f"fault: {fault}")
    for text in verdict.unread:
        say(f"not checked: {text}")
    for text in verdict.notes:
        say(f"note: {text}")
    without = counted(verdict.unchecked_files, "file") + " without checksums"
    unchecked = f", {without}" if verdict.unchecked_files else ""
    uncovered = f"; {verdict.uncovered}" if verdict.uncovered else ""
    streams = f" and {counted(verdict.streams, 'stream')}" if verdict.streams else ""
    state = "good" if verdict.good else "FAULTY" if verdict.faults else "NOT CHECKED COMPLETELY"
    if quick and verdict.good:
        state = "structure good"
    checked = _NOT_READ if quick else f", {size_text(verdict.bytes_checked)} checked"
    say(
        f"{directory}: {state}: {counted(verdict.tensors, 'tensor')} and "
        f"{counted(verdict.objects, 'object')}{streams} in {counted(verdict.files, 'file')}"
        f"{checked}{unchecked}{uncovered}"
    )
