"""datastates prune."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_datastates.cli.drop_optimizer import drop_all, finish_drops
from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    advancing,
    counted,
    json_option,
    note,
    print_json,
    reported_errors,
    require_directory,
    run_argument,
    say,
)
from megatron_datastates.errors import StorageError
from megatron_datastates.files import is_object
from megatron_datastates.format.directory import TORCH_DIST
from megatron_datastates.pipeline.runs.runs import Iteration, file_stats, stored_bytes
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    from megatron_datastates.pipeline.upkeep.left_overs import UnnamedFile
    from megatron_datastates.pipeline.upkeep.retention import OtherFormats, PrunePlan, RetentionRules

_MIN_AGE_MINUTES = 60.0


@app.command()
@run_argument
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=1),
    help="Keep the N newest complete checkpoints; after a rollback, prefer those saved since.",
)
@click.option(
    "--keep-every",
    metavar="N",
    type=click.IntRange(min=1),
    help="Keep every iteration that is a multiple of N.",
)
@click.option(
    "--drop-optimizer",
    is_flag=True,
    help="Remove no checkpoint, but only the optimizer's state of those that would be removed.",
)
@click.option(
    "--min-age",
    metavar="MINUTES",
    default=_MIN_AGE_MINUTES,
    help="Keep files that no manifest names, and checkpoints that are newer than the tracker, until they are "
    "this old: a job may be saving them. 0: no job runs.",
)
@click.option("--yes", is_flag=True, help="Remove. Without it, only list what would be removed.")
@json_option
def prune(
    root: Path,
    keep_last: int | None,
    keep_every: int | None,
    drop_optimizer: bool,
    min_age: float,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove old checkpoints of a run. Without --yes, only list what would be removed.

    The same rules apply to checkpoints of datastates and of torch_dist. Never removed: the newest complete
    checkpoint, the one that Megatron's tracker names, those that `datastates ls` shows as damaged or
    unreadable (neither command reads data), other formats, and directories that a save may be writing to.
    Also removed, from checkpoints of datastates that are kept: files that killed saves left and that no
    manifest names. If prune itself is killed, every remaining checkpoint is complete, and the next call
    removes the rest.

    In an object store (msc://PROFILE/PATH), unfinished uploads are aborted, too, if they are older than
    --min-age. Checkpoints of torch_dist stay there.

    With --drop-optimizer, checkpoints that would be removed lose only the optimizer's state and keep
    everything else, bit for bit; Megatron loads them with --no-load-optim. Each is rewritten in its own
    directory, which needs space for its weights, and replaced atomically.

    Exit codes: 0 removed, or listed; 1 a checkpoint or a left-over file could not be removed, or not
    rewritten by --drop-optimizer (the others were, as far as they could be); 2 it cannot be done.

    \b
    Example: datastates prune runs/gpt --keep-last 3 --keep-every 1000 --yes

    \b
    Example: datastates prune runs/gpt --keep-last 3 --drop-optimizer --yes
    """
    from megatron_datastates.pipeline.upkeep.left_overs import remove_left_overs
    from megatron_datastates.pipeline.upkeep.retention import RetentionRules, plan_prune

    with reported_errors(2):  # that of a damaged tracker, too, which is no checkpoint's
        require_directory(root)
        rules = RetentionRules(keep_last, keep_every, min_age * 60)
        if yes and not is_object(root):
            finish_drops(root)
        if drop_optimizer:
            raise click.exceptions.Exit(drop_all(root, rules, other_formats(root), yes, as_json))
        plan = plan_prune(root, rules, other_formats(root))
        sizes, freed = _sizes(root, plan.removed)
        if not as_json:
            _print_plan(plan, sizes, freed, yes)
        failed: list[tuple[Iteration, StorageError]] = []
        gone = _prune_with_progress(root, rules, sizes, failed) if yes and plan.removed else []
    swept: list[UnnamedFile] = []
    lacks_some = bool(failed)
    try:
        if yes:
            remove_left_overs(plan.left_overs, rules.min_age_seconds, gone=swept)
    except StorageError as error:  # what was removed is printed all the same
        note(f"datastates: {error}")
        lacks_some = True
    if as_json:
        print_json(_plain(plan, sizes, [] if yes else plan.removed, gone) | {
            "left_overs_done": [str(file.path) for file in swept],
            "failed": [{"iteration": one.number, "why": str(why)} for one, why in failed],
        })  # fmt: skip
    elif yes:
        checkpoints = _done(len(gone), len(plan.removed), "checkpoint")
        files = _done(len(swept), len(plan.left_overs), "left-over file")
        say(f"removed {checkpoints}{f', and {files}' if plan.left_overs else ''}")
    elif plan.removed or plan.left_overs:
        say("Nothing was removed. Add --yes to remove.")
    if lacks_some:
        raise click.exceptions.Exit(1)


def other_formats(root: Path) -> OtherFormats:
    """Returns what prune needs to know of torch_dist, which it leaves alone in object stores."""
    if is_object(root):
        return {}
    from megatron_datastates.convert.look import fault_of_torch_dist

    return {TORCH_DIST: fault_of_torch_dist}


def _sizes(root: Path, removed: Sequence[Iteration]) -> tuple[dict[Path, int], int]:
    """Returns the bytes of each checkpoint, and of all how many are in no other one, by a hard link."""
    if is_object(root):
        sizes = {one.path: stored_bytes(one.path) for one in removed}
        return sizes, sum(sizes.values())
    sizes, freed, linked = dict[Path, int](), 0, Counter[tuple[int, int, int, int]]()
    for one in removed:
        sizes[one.path] = 0
        for file in file_stats(one.path):
            sizes[one.path] += file.st_size
            if file.st_nlink <= 1:  # nearly all: a run may have millions, too many to be listed
                freed += file.st_size
            else:
                linked[file.st_dev, file.st_ino, file.st_nlink, file.st_size] += 1
    return sizes, freed + sum(size for (*_, links, size), names in linked.items() if names == links)


def _prune_with_progress(
    root: Path, rules: RetentionRules, sizes: dict[Path, int], failed: list[tuple[Iteration, StorageError]]
) -> list[Iteration]:
    from megatron_datastates.pipeline.upkeep.prune import prune as prune_run

    def fail(one: Iteration, why: StorageError) -> None:
        note(str(why))
        failed.append((one, why))

    with advancing("removing", sum(sizes.values())) as progress:
        return prune_run(
            root,
            rules,
            other_formats(root),
            progress=lambda one: progress(sizes.get(one.path, 0)),
            stays=lambda one, why: note(f"keep  {one.path}  ({why})"),
            fails=fail,
        )


def _done(done: int, planned: int, noun: str) -> str:
    if done == planned:
        return counted(done, noun) if done < 2 else f"all {counted(done, noun)}"
    return f"{done} of {counted(planned, noun)}"


def _print_plan(plan: PrunePlan, sizes: dict[Path, int], freed: int, yes: bool) -> None:
    from megatron_datastates.pipeline.upkeep.left_overs import age_text

    remove = "to remove" if yes else "would remove"
    for one, why in plan.kept:
        say(f"keep  {one.path}  ({why})")
    for one in plan.removed:
        say(f"{remove}  {one.path}  {size_text(sizes[one.path])}")
    for file in plan.left_overs:
        age = f"{age_text(file.age_seconds)} old"
        if file.upload:
            end = "to abort" if yes else "would abort"
            say(f"{end}  {file.path}  {size_text(file.bytes)}  (an upload that has not ended; {age})")
        else:
            say(f"{remove}  {file.path}  {size_text(file.bytes)}  (no manifest names it; {age})")
    total = len(plan.removed) + len(plan.kept)
    if plan.note:
        note(plan.note)
    whole = counted(total, "checkpoint")
    size = sum(sizes.values())
    less = f", which frees {size_text(freed)}: files are shared by hard links" if freed < size else ""
    say(f"{remove} {len(plan.removed)} of {whole}, {size_text(size)}{less}")


def _plain(
    plan: PrunePlan, sizes: dict[Path, int], listed: list[Iteration], gone: list[Iteration]
) -> dict[str, Any]:
    def rows(some: list[Iteration]) -> list[dict[str, Any]]:
        return [
            {"iteration": one.number, "path": str(one.path), "bytes": sizes.get(one.path)} for one in some
        ]

    return {
        "would_remove": rows(listed),
        "removed": rows(gone),
        "left_overs": [
            {
                "path": str(file.path),
                "bytes": file.bytes,
                "age_seconds": round(file.age_seconds),
                "is_upload": file.upload is not None,
            }
            for file in plan.left_overs
        ],
        "kept": [{"iteration": one.number, "path": str(one.path), "why": why} for one, why in plan.kept],
    }
