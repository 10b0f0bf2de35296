"""What Megatron resumes by after a conversion: the tracker file beside the iterations of a run."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from megatron_datastates.engine.atomic_files import opened, replace_file
from megatron_datastates.errors import DataStatesError
from megatron_datastates.files import is_object, lock
from megatron_datastates.format.directory import (
    METADATA_NAME,
    RELEASE_NAME,
    TRACKER_NAME,
    iteration_in_name,
    iteration_name,
)
from megatron_datastates.pipeline.runs.run_folders import has_folder
from megatron_datastates.pipeline.runs.runs import has_file, is_named_by_megatron
from megatron_datastates.pipeline.runs.tracker import tracked_name


def how_to_load(source: Path, target: Path) -> str:
    """Names a converted checkpoint in its run's tracker, and returns how Megatron loads it.

    Megatron loads only directories that it would name so itself. For another one, nothing is written.
    """
    if target.name == RELEASE_NAME or is_named_by_megatron(target):
        with one_at_a_time(target.absolute().parent):
            return _name_it(target.absolute().parent, target.name, target.parent)
    number = iteration_in_name(source.name)
    name, step = ("iter_N", "N") if number is None else (iteration_name(number), str(number))
    return (
        f"For Megatron, which loads no directory of this name, move it to RUN/{name}, and pass "
        f"--load RUN --ckpt-step {step}"
    )


def load_option(run: Path) -> str:
    """Returns Megatron's option for a run, to be copied to a shell."""
    return f"--load {shlex.quote(str(run))}"


def copy_tracker(source: Path, target: Path, failed: Collection[str] = ()) -> tuple[str, bool]:
    """Names in the target's tracker what the source's names, if it was converted.

    Args:
        failed: names of checkpoints that were not converted, now or before, although the target may have
            something there.

    Returns what came of it, and whether the target lacks what the source's tracker names. Raises StorageError
    if that cannot be seen.
    """
    try:
        name = tracked_name(source)
    except DataStatesError as error:
        return f"{error}: choose a checkpoint with {load_option(target)} --ckpt-step N", True
    if name is None:
        pass_it = f"pass {load_option(target)} --ckpt-step N"
        text = f"{source} has no {TRACKER_NAME} that names a checkpoint: {pass_it}"
        return text, has_file(source / TRACKER_NAME)  # a damaged one names something that is not known
    if name in failed or not has_folder(target, name):
        why = "was not converted" if has_folder(source, name) else "is missing"
        return (
            f"{source / TRACKER_NAME} names {name}, which {why}: "
            f"choose another with {load_option(target)} --ckpt-step N"
        ), True
    with one_at_a_time(target):
        return _name_it(target, name, target), False


@contextlib.contextmanager
def one_at_a_time(run: Path) -> Iterator[None]:
    """Lets one call at a time read a run's tracker and write it, so that the later iteration stays.

    Not so in object stores, and in file systems without locks. A training writes its tracker at any time.
    """
    if is_object(run):
        yield
        return
    with opened(run, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        lock(descriptor, wait=True)
        yield


def _name_it(run: Path, name: str, shown: Path) -> str:
    """Writes the tracker, unless it names a later iteration, or something else that cannot be compared."""
    tracker, step = run / TRACKER_NAME, iteration_in_name(name)
    otherwise = f"pass {load_option(shown)} --ckpt-step {step}"
    if step is None:
        otherwise = f"Megatron loads {name} only where the tracker says {name}"
    try:
        existing = tracked_name(run)
    except DataStatesError as error:
        return f"{error}: {otherwise}"
    if (
        (tracker.exists() if is_object(tracker) else os.path.lexists(tracker))
        and existing != name
        and not _is_earlier(existing, name)
    ):
        stays = f"still names {existing}" if existing else "names no checkpoint, and was left as it is"
        return f"{shown / TRACKER_NAME} {stays}: {otherwise}"
    if existing != name:
        replace_file(tracker, (RELEASE_NAME if step is None else str(step)).encode())
    return f"{shown / TRACKER_NAME} names {name}: pass {load_option(shown)}{_format_to_name(run / name)}"


def _format_to_name(checkpoint: Path) -> str:
    """Returns what else to pass for a checkpoint of DCP: no metadata.json says what its format is."""
    if is_object(checkpoint) or (checkpoint / METADATA_NAME).exists():
        return ""
    return " --ckpt-format fsdp_dtensor if Megatron-FSDP saved it: it is a checkpoint of PyTorch's DCP"


def _is_earlier(existing: str | None, name: str) -> bool:
    one, other = iteration_in_name(existing or ""), iteration_in_name(name)
    return one is not None and other is not None and one < other
