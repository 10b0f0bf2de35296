"""datastates ls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    Table,
    cannot,
    counted,
    json_option,
    parallelism_text,
    print_json,
    reported_errors,
    require_directory,
    run_argument,
    say,
)
from megatron_datastates.errors import DataStatesError, NotACheckpointError, OptionError, some_of
from megatron_datastates.format.directory import TRACKER_NAME, iteration_name
from megatron_datastates.pipeline.near.listing import NearCheckpoint, near_iterations
from megatron_datastates.pipeline.near.places import near_root, near_run
from megatron_datastates.pipeline.runs.run_folders import has_folder, non_persistent_in, why_no_run
from megatron_datastates.pipeline.runs.runs import has_file, is_published
from megatron_datastates.pipeline.runs.tracker import tracked_name
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    from megatron_datastates.convert.look import Look

_NAMED_NODES = 8
_WORDS = {"complete": "yes", "unfinished": "no", "damaged": "DAMAGED", "unreadable": "unreadable"}


@app.command("ls")
@run_argument
@json_option
@click.option(
    "--near",
    "near_text",
    metavar="DIR",
    type=click.Path(),
    help="Also list what this node's near tier (--datastates-near) holds.",
)
def list_checkpoints(root: Path, as_json: bool, near_text: str | None) -> None:
    """List the checkpoints of a run, and whether they are complete.

    For each: its format, size, date, ranks and parallelism. Where no directory has one of Megatron's names
    (iter_*), checkpoints with other names are listed.

    Complete means that all files are there, with the sizes that the manifest or .metadata has for them;
    `datastates verify` also reads them. A star marks the checkpoint that the tracker names: a run that
    resumes loads it. A dash marks those that a later job is known to have left, as it resumed from an older
    one. With --near, what the near tier of this node has of the run follows. A line says which
    directory has non-persistent checkpoints of the run, if any: give it to list them.

    Exit codes: 0 listed; 2 nothing to list, or no directory of that name.

    \b
    Example: datastates ls runs/gpt
    """
    from megatron_datastates.convert.look import look_at_others, look_at_run

    with reported_errors():
        near = near_root(near_text) if near_text else None  # an empty variable of a script names none
        require_directory(root)
        if near and not near.is_dir():
            raise OptionError(
                f"--near {near}: there is no such directory on this node: expected the directory of its near "
                "tier, as --datastates-near names it; a node that has saved nothing yet may have none"
            )
        runs = look_at_run(root)
        looks = runs or ([] if is_published(root) else look_at_others(root))
    held = near_iterations(near_run(near, root)) if near else {}
    if not looks and not held:
        cannot(NotACheckpointError(why_no_run(root)))
    if as_json:
        rows = sorted([*looks, *_only_near(root, held, looks)], key=lambda look: look.iteration or 0)
        print_json([_plain(look) | (_near_files(look, held) if near else {}) for look in rows])
    else:
        _print(looks)
        if runs:
            _print_tracker(root, looks, is_near=bool(held))
            if any(look.abandoned for look in looks):
                say("- of an abandoned branch: a later job resumed from an older checkpoint, or began anew")
            _print_non_persistent(root)
    if near and not as_json:
        _print_near(near, held, looks)


def _plain(look: Look) -> dict[str, Any]:
    return {
        "iteration": look.iteration,
        "path": str(look.path),
        "format": look.format,
        "complete": look.state == "complete",
        "state": look.state,
        "tracked": look.tracked,
        "abandoned": look.abandoned,
        "created": look.created,
        "bytes": look.bytes,
        "ranks": look.ranks,
        "parallel": look.parallel,
        "problem": look.problem,
        "note": look.note,
    }


def _only_near(root: Path, held: Mapping[int, NearCheckpoint], looks: list[Look]) -> list[Look]:
    """Returns a look at each iteration of the near tier that the run's directory has nothing of."""
    from megatron_datastates.convert.look import UNFINISHED, Look

    problem = "in the near tier, and not in the directory of the run yet"
    return [
        Look(root / iteration_name(number), number, "datastates", UNFINISHED, 0, "", problem=problem)
        for number in held.keys() - {look.iteration for look in looks}
    ]


def _near_files(look: Look, held: Mapping[int, NearCheckpoint]) -> dict[str, Any]:
    holding = held.get(look.iteration) if look.iteration is not None else None
    if holding is None:
        return {"near_files": 0, "near_copies": 0, "near_nodes": []}
    return {
        "near_files": holding.files,
        "near_copies": sum(holding.copies.values()),
        "near_nodes": [name for name in (holding.own, *holding.elsewhere) if name],
    }


def _print_near(near: Path, held: Mapping[int, NearCheckpoint], looks: list[Look]) -> None:
    say(f"In the near tier {near} of this node:" if held else f"The near tier {near} has nothing of this run")
    complete = {look.iteration for look in looks if look.state == "complete"}
    for iteration, holding in held.items():
        where = "" if iteration in complete else "; not in the directory of the run yet"
        say(f"  iteration {iteration}: {_near_text(holding)}{where}")


def _near_text(holding: NearCheckpoint) -> str:
    text = counted(holding.files, "data file")
    if not holding.has_manifest:
        text += ", and a manifest that cannot be read"
    if holding.copies:
        copies = ", ".join(f"{count} of {name}" for name, count in holding.copies.items())
        text += f", with copies: {copies}"
    if holding.elsewhere:
        text += f"; written on {holding.own}, here, and on {some_of(holding.elsewhere, _NAMED_NODES)}"
    return text


def _print(looks: list[Look]) -> None:
    table = Table(">iteration  ", "format", "complete", ">size", "date (UTC)", ">ranks", "parallelism")
    for look in looks:
        number = look.path.name if look.iteration is None else str(look.iteration)
        table.add(
            f"{number} {'*' if look.tracked else '-' if look.abandoned else ' '}",
            look.format,
            _WORDS[look.state],
            size_text(look.bytes),
            look.created.replace("T", " ")[:16] or "-",
            str(look.ranks or "-"),
            parallelism_text(look.parallel) or "-",
        )
    table.print()
    for look in looks:
        if look.problem or look.note:
            say(f"{look.path.name}: {look.problem or look.note}")


def _print_tracker(root: Path, looks: list[Look], *, is_near: bool) -> None:
    try:
        name = tracked_name(root)
    except DataStatesError as error:
        say(f"{error}. So it is not known which one a run would resume from")
        return
    if any(look.tracked for look in looks):
        say(f"* {TRACKER_NAME} names it")
    elif name is not None:
        say(f"{TRACKER_NAME} names {name}, which is missing: Megatron cannot resume")
    elif has_file(root / TRACKER_NAME):  # no link to nothing
        say(
            f"{TRACKER_NAME} names no checkpoint: expected the number of an iteration. A run with "
            "megatron_datastates falls back to the newest complete one, if any is a datastates checkpoint"
        )
    else:
        unless = ", or with --datastates-near from what near tiers have" * is_near
        say(f"There is no {TRACKER_NAME}: Megatron would start from random weights{unless}")


def _print_non_persistent(root: Path) -> None:
    try:
        other = non_persistent_in(root)
        is_there = other is not None and has_folder(other.directory, iteration_name(other.iteration))
    except DataStatesError as error:
        say(f"not listed: {error}")
        return
    if other is not None and not is_there and other.is_resumed:
        say(
            f"{other.directory / TRACKER_NAME} names {iteration_name(other.iteration)}, which is missing: a "
            "run cannot resume with --non-persistent-ckpt-type global"
        )
    elif other is not None:
        which = "loads that one" if other.is_resumed else "does not load them, as that is older"
        say(
            f"{other.directory} has non-persistent checkpoints, up to iteration {other.iteration}: a run "
            f"that resumes with --non-persistent-ckpt-type global {which}"
        )
