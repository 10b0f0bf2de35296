"""Storage that fails while saves run: single calls by a shim, and small disks that really fill.

A round is one job of 2 or 4 ranks that attempts several saves, each under one trouble, and saves again when
it is over. Its ranks compare what they see with what they know; here their complaints are counted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.campaign.job import notes_in
from tests.faults.campaign.tally import Campaign, Tally
from tests.support.ranks import RankForge
from tests.support.world import PATH, PRELOAD

ROUNDS = 120
ATTEMPTS = 8  # of a round with the shim
DISK_ATTEMPTS = 6
JOB_SECONDS = 180.0  # a job that runs longer hangs
HERE = Path(__file__).parent
TARGET = "tests.faults.campaign.storage_job:attempts"
NO_SPACE = ("ENOSPC", "EIO", "EDQUOT", "EROFS")
DISK_BYTES = 24 << 20


@dataclasses.dataclass(frozen=True)
class Trouble:
    """A call that goes wrong. `kind`: it must fail the save (fatal), must not (benign), or either.

    `first`: only rank 0 makes it. `nth`: how often a save makes it, at most. `onward`: also from then on.
    A save that never syncs a file is a violation, too.
    """

    call: str
    part: str
    effects: tuple[str, ...]
    kind: str
    first: bool = False
    nth: int = 1
    onward: bool = True


SMALL_FILES = ("index-", "manifest", "metadata.json")
TROUBLES = (
    Trouble("open", "data-", (*NO_SPACE, "EACCES"), "fatal"),
    Trouble("fallocate", "data-", ("ENOSPC", "EIO", "EDQUOT"), "fatal"),
    Trouble("fallocate", "data-", ("EOPNOTSUPP",), "benign"),
    Trouble("pwrite", "data-", NO_SPACE, "fatal", nth=5),
    Trouble("pwrite", "data-", ("short",), "benign", nth=4),
    Trouble("ftruncate", "data-", ("EIO",), "fatal"),
    Trouble("fsync", "data-", ("EIO", "ENOSPC", "EDQUOT"), "fatal", onward=False),
    Trouble("fsync", "data-", ("gone",), "fatal", onward=False),
    Trouble("fsyncdir", "*", ("EIO",), "fatal", nth=2),
    Trouble("fsyncdir", "*", ("EINVAL",), "benign"),
    Trouble("opendir", "*", ("EIO",), "fatal"),
    Trouble("unlink", "*", ("EIO", "EROFS"), "either"),
    Trouble("close", "*", ("EIO",), "either", nth=4),
    *(
        Trouble(call, "data-", ("EINTR",), "benign", nth=nth, onward=False)
        for call, nth in (("open", 1), ("fallocate", 1), ("pwrite", 5), ("ftruncate", 1), ("fsync", 1))
    ),
    Trouble("fsyncdir", "*", ("EINTR",), "benign", nth=4, onward=False),
    Trouble("opendir", "*", ("EINTR",), "benign", nth=4, onward=False),
    *(Trouble("open", part, NO_SPACE, "fatal", first=True) for part in SMALL_FILES),
    *(Trouble("write", part, NO_SPACE, "fatal", first=True) for part in SMALL_FILES),
    *(Trouble("write", part, ("short",), "benign", first=True) for part in SMALL_FILES),
    *(Trouble("fsync", part, ("EIO", "ENOSPC"), "fatal", first=True, onward=False) for part in SMALL_FILES),
    *(Trouble("rename", part, ("EIO", "ENOSPC", "EROFS"), "fatal", first=True) for part in SMALL_FILES),
    *(
        Trouble(call, part, ("EINTR",), "benign", first=True, onward=False)
        for part in SMALL_FILES
        for call in ("open", "write", "fsync")
    ),
)


def run(campaign: Campaign) -> Tally:
    folder = campaign.folder / "storage"
    folder.mkdir()
    environment = {"LD_PRELOAD": str(built_shim(folder))}
    root = HERE.parents[2]
    modules = (*PRELOAD, "tests.faults.campaign.storage_job")
    with RankForge(modules, (*PATH, root), environment) as forge:
        return campaign.play("storage", ROUNDS, functools.partial(_play, forge))


def built_shim(folder: Path) -> Path:
    library = folder / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-o", library, HERE / "shim.c", "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def _play(forge: RankForge, tally: Tally, round_: int, rng: random.Random, folder: Path) -> None:
    root, logs = folder / "run", folder / "logs"
    root.mkdir(parents=True)
    ranks = 4 if rng.random() < 0.2 else 2
    recipe: dict[str, Any] = {"root": str(root), "before": [[1, 1]], "mode": rng.choice(["sync", "async"])}
    disk = {1: "tmpfs", 4: "ext4", 7: "inodes"}.get(round_ % 9)
    if disk is None:
        recipe["attempts"] = [_call(rng, each, ranks) for each in range(ATTEMPTS)]
        _run(forge, tally, round_, recipe, ranks, logs)
        return
    recipe["attempts"] = [_filling(rng, each, disk) for each in range(DISK_ATTEMPTS)]
    with small_disk(root, disk) as why_not:
        if why_not:
            tally.count(f"no mount possible here: {why_not}")
            return
        _run(forge, tally, round_, recipe, ranks, logs)


def _attempt(each: int, number: int, **fields: Any) -> dict[str, Any]:
    common = {"number": number, "iteration": 100 + 10 * each, "plan": "", "victims": [], "kind": "either"}
    return common | {"must_meet": False, "spare_bytes": 0, "inodes": None} | fields


def _call(rng: random.Random, each: int, ranks: int) -> dict[str, Any]:
    trouble, effect_at = rng.choice(TROUBLES), rng.random()
    effect = trouble.effects[int(effect_at * len(trouble.effects))]
    onward = "+" if trouble.onward and rng.random() < 0.4 else ""
    code = effect if effect in ("short", "gone") else str(getattr(errno, effect))
    plan = f"{trouble.call}/{trouble.part}/{rng.randint(1, trouble.nth)}{onward}/{code}"
    kind = trouble.kind
    if rng.random() < 0.15:  # what fails cannot clean up, either
        plan, kind = f"{plan};unlink/*/1+/{errno.EIO}", kind if kind == "fatal" else "either"
    victims = [0] if trouble.first else rng.choice([[rng.randrange(ranks)], list(range(ranks))])
    # metadata.json is written where it is not yet.
    number = 3 + each if trouble.part == "metadata.json" else rng.choice([1, 2, 3 + each])
    what, must = f"{trouble.call} {trouble.part}: {effect}", trouble.call == "fsync"
    return _attempt(each, number, plan=plan, victims=victims, kind=kind, what=what, must_meet=must)


def _filling(rng: random.Random, each: int, disk: str) -> dict[str, Any]:
    number = rng.choice([1, 2])
    if disk == "inodes":
        return _attempt(each, number, inodes=rng.randint(0, 6), what="a disk without inodes")
    spare = rng.choice([-3 << 20, -4096, *range(0, 6 * 4096, 2048), 1 << 16])
    return _attempt(each, number, spare_bytes=spare, what=f"a full disk ({disk})")


@contextlib.contextmanager
def small_disk(folder: Path, disk: str) -> Iterator[str]:
    """Mounts a file system of a few MB at `folder`; yields why it cannot."""
    image = folder.with_name("image")
    commands = [["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "campaign", folder]]
    if disk == "inodes":
        commands = [["mount", "-t", "tmpfs", "-o", f"size={4 * DISK_BYTES},nr_inodes=64", "campaign", folder]]
    if disk == "ext4":
        with image.open("wb") as file:
            file.truncate(2 * DISK_BYTES)
        commands = [["mkfs.ext4", "-q", "-m", "0", image], ["mount", "-o", "loop", image, folder]]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            yield f"{command[0]}: {getattr(error, 'stderr', None) or error}"
            return
    try:
        yield ""
    finally:
        subprocess.run(["umount", folder], check=True)


def _run(forge: RankForge, tally: Tally, round_: int, recipe: dict[str, Any], ranks: int, logs: Path) -> None:
    outcome = forge.run(
        TARGET, ranks=ranks, logs=logs, arguments=[recipe, str(logs)], timeout_seconds=JOB_SECONDS
    )
    notes = notes_in(logs)
    if any(outcome.exits):
        tally.violate(round_, f"ranks ended with {outcome.exits}: {outcome.log[-3000:]}")
    for note in notes:
        if note["event"] == "violated":
            tally.violate(round_, note["text"])
        elif note["event"] == "no space for the tracker":
            tally.count(note["event"])
    seen: collections.Counter[int] = collections.Counter()
    for note in notes:
        if note["event"] == "attempted" and not seen[note["iteration"]]:
            seen[note["iteration"]] += 1
            _count(tally, json.loads(note["text"]))


def _count(tally: Tally, facts: dict[str, Any]) -> None:
    if not facts["hit"]:
        tally.count("not met: the save succeeded" if facts["error"] is None else "not met: the save failed")
        return
    tally.count("faults")
    error = facts["error"]
    result = "the save succeeded" if error is None else "all ranks failed alike"
    if error is not None and "may be in place" in error:
        result += ", and its manifest may be in place"
    tally.count(f"{facts['what']}: {result}")
