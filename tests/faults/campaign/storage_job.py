"""Ranks that save while their storage fails, say what came of it, and save again once it works.

Runs in forked ranks, whose parent was started with the shim (shim.c) preloaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore.training import tracker_recovery
from megatron_datastates.pipeline.publishing.presence import files_in_manifest as files_of
from tests.faults.campaign import oracle
from tests.faults.campaign.job import Notes, Trainer, files_in, leave, place
from tests.support.saving_rank import failure_of

_SETTLING_SECONDS = 5.0  # for files of a failed save to be removed by the threads that wrote them
_BALLAST = "ballast"


def attempts(recipe: dict[str, Any], folder: str) -> None:
    """Saves twice, then makes one attempt after the other, each followed by a save that must succeed."""
    dist.init_process_group("gloo")
    session = _Session(Path(recipe["root"]), Notes(folder, f"rank{dist.get_rank()}"), recipe["mode"])
    for number, iteration in recipe["before"]:
        session.save(number, iteration)
    for attempt in recipe["attempts"]:
        session.attempt(attempt)
    session.look_at_all()
    leave()


class _Session:
    def __init__(self, root: Path, note: Notes, mode: str) -> None:
        self._root, self._note, self._mode = root, note, mode
        self._held: dict[int, int] = {}  # what each directory holds
        self._candidates: list[int] = []
        self._shim = ctypes.CDLL(None)

    def save(self, number: int, iteration: int) -> None:
        self._candidates = [*self._candidates[-3:], *self._held.values(), iteration]
        trainer = Trainer(self._root, self._note, self._mode, tracker=False)
        trainer.save(number, iteration)
        trainer.finish()
        self._held[number] = iteration

    def attempt(self, attempt: dict[str, Any]) -> None:
        number, iteration, before = attempt["number"], attempt["iteration"], dict(self._held)
        if dist.get_rank() == 0:
            place(self._root, number).mkdir(exist_ok=True)  # Megatron's own, and no trouble of ours
        dist.barrier()
        hits = self._arm(attempt)
        error = failure_of(lambda: self.save(number, iteration))
        reported: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reported, (error, self._disarm(hits)))
        if error is not None:
            self._held = before
        elif not attempt["plan"]:
            self._track(number)
        self._look(attempt, [each for each, _ in reported], any(sum(counts) for _, counts in reported))
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self._root.glob(f"{_BALLAST}*"):
                path.unlink()
        dist.barrier()
        self.save(number, iteration + 1)
        self._require(self._found(number) == iteration + 1, attempt, "the next save is not there")

    def look_at_all(self) -> None:
        for number, iteration in self._held.items():
            self._require(self._found(number) == iteration, {}, f"at the end {number} is not {iteration}")

    # -- trouble ----------------------------------------------------------------------------------------

    def _arm(self, attempt: dict[str, Any]) -> int:
        """Calls of the victims fail from now on, or the disk is nearly full. Returns the plan's entries."""
        entries = 0
        if attempt["plan"]:
            plan = attempt["plan"] if dist.get_rank() in attempt["victims"] else ""
            entries = self._shim.shim_arm(os.fsencode(self._root), plan.encode())
            assert entries == len(plan.split(";")) * bool(plan), f"the plan {plan} was not read"
        elif dist.get_rank() == 0:
            fill(self._root, attempt)
        dist.barrier()
        return int(entries)

    def _disarm(self, entries: int) -> list[int]:
        """Ends what the shim does; returns how often each entry had its effect on this rank."""
        hits = [int(self._shim.shim_hits(entry)) for entry in range(entries)]
        if entries:
            self._shim.shim_arm(b"", b"")
        return hits

    # -- what came of it --------------------------------------------------------------------------------

    def _look(self, attempt: dict[str, Any], errors: list[str | None], injected: bool) -> None:
        error = errors[0]
        hit = injected if attempt["plan"] else error is not None
        self._require(len(set(errors)) == 1, attempt, f"ranks failed differently: {errors}")
        if attempt["kind"] == "benign":
            self._require(error is None, attempt, f"it is no failure, and the save failed: {error}")
        if attempt["kind"] == "fatal":
            self._require(not hit or error is not None, attempt, "it was met, and the save reports success")
        self._require(hit or not attempt["must_meet"], attempt, "the save made no such call")
        self._require_held(attempt, error)
        facts = {"hit": hit, "error": error, "what": attempt["what"]}
        self._note("attempted", attempt["number"], attempt["iteration"], json.dumps(facts))

    def _require_held(self, attempt: dict[str, Any], error: str | None) -> None:
        number, iteration = attempt["number"], attempt["iteration"]
        held = self._held.get(number)
        allowed = [held] if error is None or "Nothing was published" in error else [held, iteration]
        verdict = oracle.judge(place(self._root, number), self._candidates)
        found = verdict.iteration if verdict.what == "whole" else None
        has_manifest = (place(self._root, number) / MANIFEST_NAME).exists()
        fine = found in allowed and verdict.what != "violated" and has_manifest == (found is not None)
        self._require(fine, attempt, f"allowed {allowed}, found {verdict}; the error was {error}")
        if found is not None:
            self._held[number] = found
        other = min((each for each in self._held if each != number), default=number)
        whole = other == number or self._found(other) == self._held[other]
        self._require(whole, attempt, f"iteration {other} is no longer {self._held.get(other)}")
        if error is not None and "unlink" not in attempt["plan"]:
            self._require_no_rests(attempt, number)

    def _require_no_rests(self, attempt: dict[str, Any], number: int) -> None:
        """Requires that a failed save left none of its files (while removing works)."""
        directory, deadline = place(self._root, number), time.monotonic() + _SETTLING_SECONDS
        while True:
            named = files_of(directory / MANIFEST_NAME) | {MANIFEST_NAME, "metadata.json"}
            rests = [name for name in files_in(directory) if name not in named]
            if not rests or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self._require(not rests, attempt, f"a failed save left {rests}")

    def _found(self, number: int) -> int | None:
        return oracle.judge(place(self._root, number), self._candidates).iteration

    def _track(self, number: int) -> None:
        """Writes the tracker as Megatron does; where that fails, ours finds the newest checkpoint."""
        if dist.get_rank() != 0:
            return
        path = self._root / TRACKER_NAME
        try:
            path.write_text(str(number))
        except OSError:
            self._note("no space for the tracker", number, 0)
        if path.exists():
            wanted = number if path.read_text() else max(self._held)
            named, _ = tracker_recovery.wrap_read_metadata(
                lambda name: (int(Path(name).read_text()), False), str(path)
            )
            self._require(named == wanted, {}, f"the tracker leads to {named} instead of {wanted}")

    def _require(self, fine: bool, attempt: dict[str, Any], what: str) -> None:
        if not fine:
            self._note("violated", 0, 0, f"{what}; in {attempt}")


def fill(root: Path, attempt: dict[str, Any]) -> None:
    """Leaves so many bytes (or inodes) of a small file system as a save needs, more or less."""
    if attempt["inodes"] is not None:
        for count in range(max(os.statvfs(root).f_favail - attempt["inodes"], 0)):
            (root / f"{_BALLAST}{count}").touch()
        return
    need = sum(path.stat().st_blocks * 512 for path in place(root, 1).glob("data-*"))
    facts = os.statvfs(root)
    spare = facts.f_bavail * facts.f_frsize - need - attempt["spare_bytes"]
    if spare > 0:
        descriptor = os.open(root / _BALLAST, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, spare)
        finally:
            os.close(descriptor)
