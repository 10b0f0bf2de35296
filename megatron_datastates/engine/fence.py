"""The fence: the wait before the first mutation.

Every save that reads live memory stands here until its copies are safe. Whoever is about to change
that memory calls `fence` first; see mcore/fences.py for who does.
"""

from __future__ import annotations

import os
from typing import Protocol


class Fenced(Protocol):
    """A save that still reads memory of the trainer."""

    def fence(self, reason: str) -> None:
        """Returns when the memory may change. Never raises: a save that cannot make it fails instead."""
        ...

    def torn(self, reason: str) -> None:
        """The memory changed before the save was fenced: it fails."""
        ...

    def polled(self) -> None:
        """The trainer polls, for this save or for another: what was put off until then may begin."""
        ...


class Fence:
    """The saves of this process that must be waited for. Used by the trainer's thread alone."""

    def __init__(self) -> None:
        self._standing: list[Fenced] = []

    def add(self, save: Fenced) -> None:
        self._standing.append(save)

    def discard(self, save: Fenced) -> None:
        """The save no longer reads anything of the trainer's."""
        if save in self._standing:
            self._standing.remove(save)

    def wait(self, reason: str) -> None:
        """Lets every standing save pass, oldest first; one added meanwhile waits for the next call."""
        for _ in range(len(self._standing)):
            if self._standing:
                self._standing.pop(0).fence(reason)

    def witness_mutation(self, reason: str) -> None:
        """Something has changed already: a save that still stands here may have copied both old and new."""
        for _ in range(len(self._standing)):
            if self._standing:
                self._standing.pop(0).torn(reason)

    def polled(self) -> None:
        """Lets every standing save know of a poll: Megatron's queue asks for the oldest save alone."""
        for save in self._standing:
            save.polled()

    def forget(self) -> None:
        """In a forked child, whose copies of the saves nobody works on."""
        self._standing.clear()


FENCE = Fence()
os.register_at_fork(after_in_child=FENCE.forget)
