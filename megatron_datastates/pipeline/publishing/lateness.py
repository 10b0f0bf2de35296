"""Says in the logs that all ranks wait for one, or for some.

Storage that hangs returns no error: training goes on, and no checkpoint is published any more. Sums of flags
show how many ranks are late, and which one if it is one: rank 0, whose log is read first, says so. Each of
these ranks says in its own log what stands still, with the name of its node.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time

logger = logging.getLogger(__name__)
LATE_SECONDS = 60.0
_LOGGING_RANKS = 16  # about so many of those that are late
_OF_STORAGE = "look at the storage and the mounts of that node"


class _StandingStill:
    """For how long something has not moved, and when that is to be logged again."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0
        self._next = LATE_SECONDS  # of standing still, until it is logged

    def seconds(self, moved: object, *, logs: bool = True) -> float | None:
        """Returns for how long, if it is logged now; after that again after twice the time, and so on.

        Args:
            moved: differs from the last one if something has moved; None if nobody waits.
            logs: whether anything is logged now, however long it was.
        """
        now = time.monotonic()
        if moved is None or moved != self._seen:
            self._seen, self._since, self._next = moved, now, LATE_SECONDS
            return None
        seconds = now - self._since
        if not logs or seconds < self._next:
            return None
        self._next = 2 * seconds
        return seconds


class Lateness:
    """Whether this rank's part of something common stands still. Used by one thread.

    Args:
        what: the others wait for; named in the message.
    """

    def __init__(self, what: object, rank: int) -> None:
        self._what, self._rank = what, rank
        self._still = _StandingStill()
        # From 0 to 1; not random, as training has the random numbers. CRCs of every fourth rank are alike.
        self._draw = int.from_bytes(hashlib.sha256(b"%d" % rank).digest()[:8]) / (1 << 64)

    def look(self, moved: object, doing: str, late: int = 1, advice: str = _OF_STORAGE) -> None:
        """Logs that nothing has moved for LATE_SECONDS; again after twice the time, and so on.

        Args:
            moved: differs from the last one if something has moved; None if nobody waits for this rank.
            doing: what it has not done.
            late: ranks that have not done it. Where they are many, as when all storage hangs, some log.
            advice: what to do about it.
        """
        seconds = self._still.seconds(moved, logs=self._draw * late < _LOGGING_RANKS)
        if seconds is not None:
            logger.warning(
                "%s: rank %d on node %s%s keeps all others waiting: %s for %.0f s; %s",
                self._what,
                self._rank,
                socket.gethostname(),
                f", like {late - 1} other{'s' if late > 2 else ''}," if late > 1 else "",
                doing,
                seconds,
                advice,
            )


class LatenessOfOthers:
    """Whether ranks have not written their files long after this one has. Used by one thread."""

    def __init__(self, what: object, ranks: int) -> None:
        self._what, self._ranks = what, ranks
        self._still = _StandingStill()

    def look(self, late: int, rank: int) -> None:
        """Logs that equally many ranks were late for LATE_SECONDS; again after twice the time, and so on.

        Args:
            late: how many are; 0 if this rank has not written its file either.
            rank: which one, if it is one.
        """
        seconds = self._still.seconds(late or None)
        if seconds is not None:
            logger.warning(
                "%s is not published: for %.0f s, all wait for %s to finish writing; %s",
                self._what,
                seconds,
                f"rank {rank}" if late == 1 else f"{late} of {self._ranks} ranks",
                "their logs say where nothing moves"
                if late > 1
                else "its log says so if nothing moves there",
            )
