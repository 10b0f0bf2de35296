"""A round of `damage`, in a forked process: one damage, a load, `verify`, a command."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path
from typing import Any

from megatron_datastates.config import MIB, Options
from tests.faults.campaign import judging, patterns, specimens
from tests.faults.campaign.damages import Damage, Victim, damage
from tests.faults.campaign.isolated import Found
from tests.faults.campaign.regions import MANIFEST, METADATA, Region, regions

CANDIDATES = [(specimens.USUAL.iteration, specimens.USUAL.layout)]


@functools.cache
def regions_of(directory: Path) -> list[Region]:
    return regions(directory)


def prepare(facts: dict[str, Any]) -> None:
    """Computes what all rounds need before any fork, so that no round does."""
    sound = specimens.place(Path(facts["root"]), specimens.USUAL)
    regions_of(sound)
    judging.command("ls", facts["root"])
    judging.command("show", sound)
    patterns.sharded_state(*CANDIDATES[0], 1, 0)


def play(round_: int, seed: int, folder: Path, facts: dict[str, Any]) -> Found:
    rng, root = random.Random(seed), Path(facts["root"])
    sound = specimens.place(root, specimens.USUAL)
    directory = folder / "run" / sound.name
    directory.mkdir(parents=True)
    for name in os.listdir(sound):
        os.link(sound / name, directory / name)
    others = [specimens.place(root, each) for each in specimens.ALL if each != specimens.USUAL]
    done = damage(Victim(directory, regions_of(sound), others, sound), round_, rng)
    found = Found()
    found.count(f"damage: {done.kind}")
    if done.area:
        found.count(f"damaged bytes: {done.area}")
    try:
        _judge(found, done, directory, rng)
    except Exception as error:
        error.add_note(f"after: {done.text}")
        raise
    found.violations = [f"{each}\n        after: {done.text}" for each in found.violations]
    return found


def _judge(found: Found, damage: Damage, directory: Path, rng: random.Random) -> None:
    options = Options(
        read_threads=rng.choice([1, 2, 4]), direct_io=rng.random() < 0.3, staging_memory=8 * MIB
    )
    is_by_megatron = rng.random() < 0.4
    outcome = (
        judging.by_megatron(directory, CANDIDATES)
        if is_by_megatron
        else judging.by_reader(directory, CANDIDATES, options)
    )
    reader = "Megatron's load" if is_by_megatron else "our reader"
    faults = judging.faults_of(directory, options)
    if outcome.wrong:
        found.violate(f"{reader}: {outcome.wrong}")
    elif outcome.refused:
        found.count(f"refused by {reader}")
        is_named = any(f"{directory}/{name}" in outcome.refused for name in damage.files)
        if not is_named and not _names_checkpoint(outcome.refused, damage, directory):
            found.violate(f"{reader}: the refusal does not name the file: {outcome.refused}")
        if not faults:
            found.violate(f"verify finds nothing; {reader} says: {outcome.refused}")
    else:
        found.count(f"loaded exactly by {reader}")
        found.count(f"loaded exactly: {damage.kind}")
        found.count("loaded exactly, verify finds a fault" if faults else "loaded exactly, verify finds none")
    _judge_commands(found, directory, bool(faults), options, rng)


def _names_checkpoint(text: str, damage: Damage, directory: Path) -> bool:
    """Returns whether the damage may hide what the directory is, and the error names the directory."""
    return bool({MANIFEST, METADATA} & set(damage.files)) and str(directory) in text


def _judge_commands(
    found: Found, directory: Path, is_faulty: bool, options: Options, rng: random.Random
) -> None:
    what = rng.choice(["ls", "show", "stats", "verify", "cat", "convert", "convert", "repair", "diff"])
    found.count(f"command: {what}")
    if what == "ls":
        judging.command("ls", directory.parent)
    elif what in ("show", "stats"):
        judging.command("show", directory, *(["--stats"] if what == "stats" else []))
    elif what == "diff":
        judging.command("diff", directory, directory)
    elif what == "cat":
        judging.command("cat", directory, rng.choice(["numbers", "own/shard_1_2", "common_state/shard_0_1"]))
    elif what == "verify":
        code, said = judging.command("verify", directory)
        if (code != 0) != is_faulty:
            found.violate(f"the command and verify differ: {said}")
    elif what == "convert":
        form = rng.choice(["torch_dist", "datastates"])
        outcome = judging.by_conversion(directory, directory.parent / "made", form, CANDIDATES)
        found.count("converted exactly" if outcome.iteration else "conversion refused")
        if outcome.wrong:
            found.violate(f"convert to {form}: {outcome.wrong}")
    elif judging.repaired(directory, options):
        found.count("repaired")
        outcome = judging.by_reader(directory, CANDIDATES, options)
        if outcome.iteration is None:
            found.violate(f"repair made a manifest, and then: {outcome}")
