"""The fence: the wait before the first mutation of memory that a save reads, and before that memory is freed.

Every save that reads live memory is registered here until its copies are safe. Code that is about to change
that memory calls `wait` first; code that is about to free or unmap it calls `wait_until_unread`.
mcore/fences.py makes these calls.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Fenced(Protocol):
    """A save that still reads memory of the trainer."""

    def fence(self, reason: str) -> None:
        """Returns when the memory may change. Never raises: after too long a wait the save fails."""
        ...

    def mark_torn(self, reason: str) -> None:
        """Fails the save, because the memory changed before it was fenced."""
        ...


class Reader(Protocol):
    """A save whose copies may be under way, whether the fence has released it or not."""

    def reads(self, storage: int) -> bool:
        """Returns whether the save may still read that storage (an UntypedStorage's `_cdata`)."""
        ...

    def await_copies(self) -> None:
        """Returns when the save reads nothing of the trainer's any more. Never raises."""
        ...


class Fence:
    """The saves of this process that mutations must wait for.

    Attributes:
        frees: calls so far that free or unmap memory; None while nobody watches them.

    Used by the trainer's thread, by threads that work for it while it waits (autograd's), and by one that
    aborts its queue: each changes a list by one atomic operation, which another may have made before it.
    """

    def __init__(self) -> None:
        self._standing: list[Fenced] = []
        # A plain list, so that testing for emptiness is cheap. Saves leave it when discarded or
        # garbage-collected.
        self.readers: list[weakref.ref[Reader]] = []
        self.frees: int | None = None

    @property
    def has_saves(self) -> bool:
        """Whether a save reads memory that may change at a fence."""
        return bool(self._standing)

    def add(self, save: Fenced) -> None:
        self._standing.append(save)

    def discard(self, save: Fenced) -> None:
        """Removes a save that no longer reads anything of the trainer's."""
        with contextlib.suppress(ValueError):
            self._standing.remove(save)

    def wait(self, reason: str) -> None:
        """Fences every registered save, oldest first; one added meanwhile is left to the next call.

        An interrupted wait does not count: the program may catch a KeyboardInterrupt, and step again. So a
        save leaves only once it is fenced. Until then, another thread that calls this waits for it, too.
        """
        for save in list(self._standing):
            save.fence(reason)
            self.discard(save)

    def add_reader(self, save: Reader) -> None:
        self.readers.append(weakref.ref(save, self._forget_reader))

    def _forget_reader(self, reference: weakref.ref[Reader]) -> None:
        with contextlib.suppress(ValueError):
            self.readers.remove(reference)

    def discard_reader(self, save: Reader) -> None:
        """Removes a save whose copies are over."""
        self._forget_reader(weakref.ref(save))

    def note_free(self) -> None:
        """Counts a call that frees or unmaps memory. Copies may still read it."""
        self.frees = (self.frees or 0) + 1

    def wait_until_unread(self, storage: int | None = None) -> None:
        """Returns when no save reads that storage any more (an UntypedStorage's `_cdata`; None: any storage).

        Device copies, which `wait` leaves to the order of streams, are over then too: memory may be freed or
        unmapped.
        """
        for reference in list(self.readers):
            save = reference()
            if save is not None and (storage is None or save.reads(storage)):
                save.await_copies()

    def clear(self, reason: str) -> None:
        """Returns when all memory that saves were reading may be changed, freed and unmapped."""
        self.wait(reason)
        self.wait_until_unread()

    def witness_mutation(self, reason: str) -> None:
        """Fails every registered save: memory has changed already, so copies may mix two states."""
        for save in list(self._standing):
            save.mark_torn(reason)
            self.discard(save)

    def forget(self) -> None:
        """Drops all saves, in a forked child: no thread of the child works on them."""
        self._standing.clear()
        self.readers.clear()


FENCE = Fence()
os.register_at_fork(after_in_child=FENCE.forget)


def fence() -> None:
    """Waits until all memory that lazy saves were reading may be changed, freed or unmapped.

    Call it before doing any of these except in an optimizer's step.
    """
    FENCE.clear("an explicit fence")
