"""The fence: the wait before the first mutation, and before memory is given up.

Every save that reads live memory stands here until its copies are safe. Whoever is about to change
that memory calls `wait` first; whoever is about to free or unmap it calls `wait_until_unread`. See
mcore/fences.py for who does.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Fenced(Protocol):
    """A save that still reads memory of the trainer."""

    def fence(self, reason: str) -> None:
        """Returns when the memory may change. Never raises: a save that cannot make it fails instead."""
        ...

    def mark_torn(self, reason: str) -> None:
        """The memory changed before the save was fenced: it fails."""
        ...

    def on_poll(self) -> None:
        """The trainer polls, for this save or for another: what was put off until then may begin."""
        ...


class Reader(Protocol):
    """A save whose copies may not be over, whether it stands at the fence or not."""

    def reads(self, storage: int) -> bool:
        """Whether it may still read there. `storage` is an UntypedStorage's `_cdata`."""
        ...

    def await_copies(self) -> None:
        """Returns when it reads nothing of the trainer's any more. Never raises."""
        ...


class Fence:
    """The saves of this process that must be waited for.

    Used by the trainer's thread alone, and by those that work for it while it waits (autograd's).
    """

    def __init__(self) -> None:
        self._standing: list[Fenced] = []
        # Cheap to ask whether there are any. A save that is over is also dropped, not only discarded.
        self.readers: list[weakref.ref[Reader]] = []

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

    def add_reader(self, save: Reader) -> None:
        self.readers.append(weakref.ref(save, self.readers.remove))

    def discard_reader(self, save: Reader) -> None:
        """Its copies are over."""
        if (reference := weakref.ref(save)) in self.readers:
            self.readers.remove(reference)

    def wait_until_unread(self, storage: int | None = None) -> None:
        """Returns when no save reads that storage any more (an UntypedStorage's `_cdata`), or any at all.

        What `wait` leaves to the order of streams is over then, too: memory may be freed, or unmapped.
        """
        for reference in list(self.readers):
            save = reference()
            if save is not None and (storage is None or save.reads(storage)):
                save.await_copies()

    def witness_mutation(self, reason: str) -> None:
        """Something has changed already: a save that still stands here may have copied both old and new."""
        for _ in range(len(self._standing)):
            if self._standing:
                self._standing.pop(0).mark_torn(reason)

    def on_poll(self) -> None:
        """Lets every standing save know of a poll: Megatron's queue asks for the oldest save alone."""
        for save in self._standing:
            save.on_poll()

    def forget(self) -> None:
        """In a forked child, whose copies of the saves nobody works on."""
        self._standing.clear()
        self.readers.clear()


FENCE = Fence()
os.register_at_fork(after_in_child=FENCE.forget)
