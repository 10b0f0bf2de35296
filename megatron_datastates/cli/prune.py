"""datastates prune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_datastates.cli.shared import AsJson, app, binary_size, cannot, notes, progress_bar, say
from megatron_datastates.errors import DataStatesError, OptionError
from megatron_datastates.pipeline.prune import (
    MIN_AGE_SECONDS,
    PrunePlan,
    Rules,
    age_text,
    plan_prune,
    remove_left_overs,
)
from megatron_datastates.pipeline.prune import prune as prune_run
from megatron_datastates.pipeline.runs import Iteration, stored_bytes


@app.command()
def prune(
    root: Annotated[Path, typer.Argument(help="The directory given to --save.")],
    keep_last: Annotated[int | None, typer.Option(help="Keep so many of the newest complete ones.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep iterations that are a multiple of this.")
    ] = None,
    min_age: Annotated[
        float,
        typer.Option(help="Minutes for which files that no manifest names count as those of a live save."),
    ] = MIN_AGE_SECONDS / 60,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove them. Without it: only say what would go.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints of a run. Without --yes, only say which.

    Never goes: the newest complete one, the one that the tracker names, other formats, damaged ones, and
    what a save may be writing to. A kill at any time leaves whole checkpoints, and rests for the next call.
    Files of killed saves beside a checkpoint that stays go, too: those that no manifest names.

    Exit codes: 0 done (or told what would go), 2 it cannot be done.

    Example: datastates prune runs/gpt --keep-last 3 --keep-every 1000 --yes
    """
    if keep_last is None and keep_every is None:
        cannot(OptionError("say what to keep: --keep-last N, --keep-every N, or both"))
    try:
        rules = Rules(keep_last, keep_every, min_age * 60)
        plan = plan_prune(root, rules)
        sizes = {one.path: stored_bytes(one.path) for one in plan.removed}
        if not as_json:
            _print_plan(plan, sizes, yes)
        gone = _prune_with_progress(root, rules, sizes) if yes and plan.removed else []
        swept = remove_left_overs(plan.left_overs, rules.min_age_seconds) if yes else []
    except (DataStatesError, OSError) as error:
        cannot(error)
    if as_json:
        print(json.dumps(_plain(plan, sizes) | {
            "done": [one.number for one in gone], "left_overs_done": [str(file.path) for file in swept],
        }))  # fmt: skip
    elif yes:
        say(f"removed {len(gone)} of {len(plan.removed)}{_and_files(len(swept), len(plan.left_overs))}")
    elif plan.removed or plan.left_overs:
        say("Nothing was removed: add --yes.")


def _prune_with_progress(root: Path, rules: Rules, sizes: dict[Path, int]) -> list[Iteration]:
    with progress_bar("removing") as progress:
        task = progress.add_task("", total=sum(sizes.values()))
        return prune_run(
            root,
            rules,
            progress=lambda one: progress.advance(task, sizes.get(one.path, 0)),
            stays=lambda one, why: notes.print(f"stays    {one.path}  ({why})", soft_wrap=True),
        )


def _and_files(done: int, planned: int) -> str:
    return f", and {done} of {planned} left-over files" if planned else ""


def _print_plan(plan: PrunePlan, sizes: dict[Path, int], yes: bool) -> None:
    for one, why in plan.kept:
        say(f"stays    {one.path}  ({why})")
    for one in plan.removed:
        say(f"{'goes' if yes else 'would go'}  {one.path}  {binary_size(sizes[one.path])}")
    for file in plan.left_overs:
        why = f"no manifest names it; {age_text(file.age_seconds)} old"
        say(f"{'goes' if yes else 'would go'}  {file.path}  {binary_size(file.bytes)}  ({why})")
    say(f"{len(plan.removed)} of {len(plan.removed) + len(plan.kept)}, {binary_size(sum(sizes.values()))}")


def _plain(plan: PrunePlan, sizes: dict[Path, int]) -> dict[str, Any]:
    return {
        "removed": [
            {"iteration": one.number, "path": str(one.path), "bytes": sizes[one.path]} for one in plan.removed
        ],
        "left_overs": [
            {"path": str(file.path), "bytes": file.bytes, "age_seconds": round(file.age_seconds)}
            for file in plan.left_overs
        ],
        "kept": [{"iteration": one.number, "path": str(one.path), "why": why} for one, why in plan.kept],
    }
