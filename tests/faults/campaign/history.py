"""What ranks noted before they ended, and what may therefore lie in each directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.faults.campaign.oracle import Verdict


class History:
    """What one run's ranks noted. A save is `done` when any rank has read that it is published."""

    def __init__(self, notes: Iterable[Mapping[str, Any]]) -> None:
        self._begun: dict[int, list[int]] = {}
        self._done: dict[int, int] = {}
        self.removed: set[int] = set()
        self.last_begun = 1
        for note in notes:
            number, iteration = note["number"], note["iteration"]
            if note["event"] == "begin":
                self.last_begun = number
                if iteration not in self._begun.setdefault(number, []):
                    self._begun[number].append(iteration)
            elif note["event"] == "done":
                self._done[number] = max(iteration, self._done.get(number, 0))
            elif note["event"] == "removed":
                self.removed.add(number)

    @property
    def numbers(self) -> list[int]:
        return sorted(self._begun)

    @property
    def iterations(self) -> list[int]:
        return sorted({each for begun in self._begun.values() for each in begun})

    def allowed(self, number: int) -> list[int]:
        """Iterations that a directory may hold: the last one done, or one begun after it."""
        begun, done = self._begun[number], self._done.get(number)
        return begun if done is None else begun[begun.index(done) :]

    def complaint(self, number: int, verdict: Verdict, has_manifest: bool, has_prune: bool) -> str | None:
        """Returns what is wrong with what was found in a directory, if anything."""
        if verdict.what == "violated":
            return f"iteration {number}: {verdict.why}"
        if verdict.what == "whole":
            if verdict.iteration in self.allowed(number):
                return None
            return f"iteration {number} holds {verdict.iteration} instead of one of {self.allowed(number)}"
        if has_manifest:
            return f"iteration {number} has a manifest and is refused: {verdict.why}"
        newest = max(self._done, default=None)
        if number in self._done and not (has_prune and number != newest):
            return f"iteration {number} was published with {self._done[number]} and is lost: {verdict.why}"
        return None
