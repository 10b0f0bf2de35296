"""Polls: one step of every unfinished save's protocol, with one sum over the ranks.

A training loop polls once for each iteration, and a save takes about five polls to be published. So a poll
advances all saves that are under way, whichever of them it is called for: a loop that saves in every
iteration publishes as many checkpoints as it begins. They are published in the order in which they began.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from megatron_datastates.errors import DataStatesError
from megatron_datastates.pipeline.publishing.collectives import Collectives, PendingResult
from megatron_datastates.pipeline.saving.postponement import Postponement
from megatron_datastates.threads import is_in_background

T = TypeVar("T")


class Flags(NamedTuple):
    """What a rank adds to the sum for one save, each 0 or 1 but for bytes and the rank; also that sum."""

    unfinished: int  # not durable; once records were sent, not published
    failed: int
    in_place: int  # the manifest is in its place, or may be
    offered_bytes: int  # that rank 0 wants to send to all (near/publishing.py)
    without_copies: int  # the rank has left out copies that it was to make
    unfinished_rank: int  # its number if it is unfinished: in the sum, that of the only one


class Turn:
    """Who may start or poll saves: one thread at a time, and no signal handler in the middle of that.

    Other threads wait. The exception is a poll where there is only one rank: it returns without a step, which
    harms nothing, because no other rank has to poll equally often.

    Taken by a function and not by a `with` block, as a signal may arrive between any two calls.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # re-entrant: the thread that has it gets an error, and no deadlock
        self.owner: int | None = None  # the thread

    def take(self, act: Callable[[], T]) -> T:
        """Calls `act` when it is this thread's turn; returns what that returns. Raises as `require_free`."""
        with self.lock:
            self.require_free()
            self.owner = threading.get_ident()
            try:
                return act()
            finally:
                self.owner = None

    def require_free(self) -> None:
        """Raises DataStatesError where this thread is in the middle of a start or a poll.

        Or on a thread of ours, which writes what a provider stores: the other save could wait for this one.
        """
        if self.owner is not None or is_in_background():
            raise DataStatesError(
                "a signal handler, a finalizer or a state provider saves, or waits for a save, in the middle "
                "of the start or the poll of another one: save once that call has returned; a signal handler "
                "only sets a flag"
            )


class Polled(Protocol):
    """A save that polls advance."""

    postponement: Postponement  # of what waits for a poll

    @property
    def is_over(self) -> bool:
        """Returns whether its outcome is known; the same on every rank."""
        ...

    @property
    def sums_flags(self) -> bool:
        """Returns whether the next poll reads its flags; the same on every rank."""
        ...

    def flags(self) -> Flags:
        """Returns what this rank adds to the sum."""
        ...

    def abandon(self, reason: str) -> None:
        """Ends the save on this rank: a poll of it was interrupted, so what it has done is not known."""
        ...

    def step(self, sums: Flags | None, *, is_first: bool, may_publish: bool) -> bool:
        """Takes one step of the protocol.

        Args:
            sums: of all ranks' flags, from the previous poll; None if it requested none.
            is_first: no earlier save is unfinished.
            may_publish: every earlier save is being published, or over.

        Returns:
            Whether a later save may be published.
        """
        ...


class Polls:
    """The unfinished saves of one world, in the order in which they began. Used by one thread at a time."""

    def __init__(self, collectives: Collectives, turn: Turn | None = None) -> None:
        self.collectives = collectives
        self._turn = turn or Turn()
        self._saves: list[Polled] = []
        self._pending_sum: PendingResult[list[int]] | None = None
        self._in_sum: list[Polled] = []

    def add(self, save: Polled) -> None:
        """Adds a save that begins. Collective: every rank calls it for the same saves in the same order."""
        self._saves.append(save)

    def discard(self, save: Polled) -> None:
        """Forgets a save until it is polled itself. Collective, if others are polled later."""
        self._saves = [other for other in self._saves if other is not save]
        if not self._saves:
            self._pending_sum, self._in_sum = None, []

    def poll(self, polled: Polled, *, waits: bool = False) -> list[Polled]:
        """Advances every save by one step; returns those that are over now. Collective.

        Waits only for ranks that are a whole poll late, and for the previous poll's call on the device.

        Args:
            polled: the save that the program polls.
            waits: the program polls until that save is over: forever, if polls took no step.

        Raises:
            DataStatesError: another start or poll is further up the stack, and would have to go on first.
        """
        turn = self._turn
        if turn.owner is not None and self.collectives.size == 1:
            # The state provider of another thread's start may wait for this one. No rank counts polls.
            if waits and turn.owner == threading.get_ident():
                turn.require_free()
            return []
        return turn.take(functools.partial(self._poll, polled))

    def _poll(self, polled: Polled) -> list[Polled]:
        try:
            return self._step(polled)
        except BaseException as error:  # an interrupt, or a peer that is gone
            saves, self._saves, self._pending_sum, self._in_sum = self._saves, [], None, []
            for save in saves:
                save.abandon(f"a poll was interrupted by {type(error).__name__}")
            raise

    def _step(self, polled: Polled) -> list[Polled]:
        if not any(save is polled for save in self._saves):
            self._saves.append(polled)
        for save in self._saves:
            save.postponement.charge()
        sums = iter(self._pending_sum.result() if self._pending_sum is not None else [])
        found = {id(save): Flags._make(islice(sums, len(Flags._fields))) for save in self._in_sum}
        is_first = may_publish = True
        for save in self._saves:
            may_publish &= save.step(found.get(id(save)), is_first=is_first, may_publish=may_publish)
            is_first &= save.is_over
        over = [save for save in self._saves if save.is_over]
        self._saves = [save for save in self._saves if not save.is_over]
        self._in_sum = [save for save in self._saves if save.sums_flags]
        flags = [flag for save in self._in_sum for flag in save.flags()]
        self._pending_sum = self.collectives.start_sum(flags) if flags else None
        for save in self._saves:  # last, as it takes cores
            save.postponement.end_at_poll()
        return over
