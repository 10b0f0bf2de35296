"""Rounds each in a forked process of its own, so that a crash, a hang or a flood of memory is one violation.

What belongs here: forking, limits, and bringing home what a round found. What does not: what a round does.
The process that forks has imported torch and Megatron and starts no thread.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.campaign.tally import Campaign, Tally

ROUND_SECONDS = 40.0  # a round takes a fifth of a second; one that takes this long hangs
RESIDENT_BYTES = 384 << 20  # the most that a round may add to what it was forked with
ADDRESS_BYTES = 2 << 30  # of address space, in which stacks and arenas of threads are only reserved


@dataclasses.dataclass
class Found:
    """What a round saw: outcomes to count, and what must never happen."""

    outcomes: list[str] = dataclasses.field(default_factory=list)
    violations: list[str] = dataclasses.field(default_factory=list)

    def count(self, outcome: str) -> None:
        self.outcomes.append(outcome)

    def violate(self, what: str) -> None:
        self.violations.append(what)


# Gets the round, a seed of its own, an empty folder, and what the part has said.
Play = Callable[[int, int, Path, dict[str, Any]], Found]


def play_all(campaign: Campaign, tally: Tally, default: int, play: str, facts: dict[str, Any]) -> None:
    """Plays rounds of the module `play` and counts what they found.

    It has a Play called `play`, and `prepare(facts)`, which is called once before any round.
    """
    start = time.monotonic()
    folder = campaign.folder / tally.part / "rounds"
    folder.mkdir(parents=True)
    rounds = [[round_, rng.getrandbits(62)] for round_, rng in campaign.each_round(tally, default)]
    seconds = None if campaign.minutes is None else campaign.minutes * 60
    todo = {"play": play, "facts": facts, "rounds": rounds, "seconds": seconds}
    (folder / "todo.json").write_text(json.dumps(todo))
    campaign.forge.run(
        "tests.faults.campaign.isolated:serve",
        ranks=1,
        logs=folder / "log",
        arguments=[str(folder)],
        timeout_seconds=300 + ROUND_SECONDS * len(rounds),
    ).succeeded()
    found = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
    played = rounds if seconds is None else rounds[: len(found)]
    assert [each["round"] for each in found] == [round_ for round_, _ in played], "a round is missing"
    if len(played) < len(rounds):
        tally.count(f"not all of {len(rounds)} rounds: the time was over")
    tally.rounds = len(played)
    for each in found:
        tally.outcomes.update(each["outcomes"])
        for violation in each["violations"]:
            tally.violate(each["round"], violation)
    tally.seconds = time.monotonic() - start


# -- in a forked rank -----------------------------------------------------------------------------------


def serve(folder: str) -> None:
    """Plays the rounds of todo.json one by one; a line of found.jsonl is what one found."""
    todo = json.loads(Path(folder, "todo.json").read_text())
    module = importlib.import_module(todo["play"])
    play: Play = module.play
    module.prepare(todo["facts"])
    gc.collect()
    gc.freeze()
    end = None if todo["seconds"] is None else time.monotonic() + todo["seconds"]
    with Path(folder, "found.jsonl").open("w") as results:
        for round_, seed in todo["rounds"]:
            if end is not None and time.monotonic() > end:
                break
            place = Path(folder, "place")
            place.mkdir()
            found = _forked(
                lambda n=round_, s=seed, p=place: play(n, s, p, todo["facts"]), Path(folder, "hangs")
            )
            shutil.rmtree(place)
            print(json.dumps({"round": round_, **dataclasses.asdict(found)}), file=results, flush=True)


def _forked(play: Callable[[], Found], hangs: Path) -> Found:
    before = _resident_bytes()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _child(play, theirs, hangs)
    os.close(theirs)
    data = _read_all(ours, time.monotonic() + ROUND_SECONDS)
    os.close(ours)
    if data is None:
        os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    if data is None:
        return Found([], [f"it did not end within {ROUND_SECONDS:g} s:\n{hangs.read_text()[-3000:]}"])
    code = os.waitstatus_to_exitcode(status)
    if code != 0 or not data:
        return Found([], [f"its process ended with {code}"])
    found = Found(**json.loads(data))
    grown = used.ru_maxrss * 1024 - before
    if grown > RESIDENT_BYTES:
        found.violate(f"it took {grown >> 20} MiB, and {RESIDENT_BYTES >> 20} are the most")
    return found


def _child(play: Callable[[], Found], target: int, hangs: Path) -> None:
    """Runs a round in this process and ends the process; never returns."""
    try:
        with hangs.open("w") as file:
            faulthandler.dump_traceback_later(ROUND_SECONDS * 0.9, file=file)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            most = _address_bytes() + ADDRESS_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            try:
                found = play()
            except BaseException:
                found = Found([], [traceback.format_exc()[-4000:]])
            data = json.dumps(dataclasses.asdict(found)).encode()
            while data:
                data = data[os.write(target, data) :]
        sys.stdout.flush()
        os._exit(0)
    finally:
        os._exit(70)


def _read_all(descriptor: int, deadline: float) -> bytes | None:
    """Returns all that is written to a pipe until its other end closes; None if that is not in time."""
    parts = []
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return None
        part = os.read(descriptor, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
