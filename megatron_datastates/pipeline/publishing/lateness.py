"""Says in a rank's own log that all others wait for it.

Sums of flags do not show which rank is late, and storage that hangs returns no error: training goes on, and
no checkpoint is published any more. So the rank itself says it, with the name of its node.
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


class Lateness:
    """Whether this rank's part of something common stands still. Used by one thread.

    Args:
        what: the others wait for; named in the message.
    """

    def __init__(self, what: object, rank: int) -> None:
        self._what, self._rank = what, rank
        self._seen: object = None
        self._since = 0.0
        self._next = LATE_SECONDS  # of standing still, until it is logged
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
        now = time.monotonic()
        if moved is None or moved != self._seen:
            self._seen, self._since, self._next = moved, now, LATE_SECONDS
        elif now - self._since >= self._next and self._draw * late < _LOGGING_RANKS:
            self._next = 2 * (now - self._since)
            logger.warning(
                "%s: rank %d on node %s%s keeps all others waiting: %s for %.0f s; %s",
                self._what,
                self._rank,
                socket.gethostname(),
                f", like {late - 1} other{'s' if late > 2 else ''}," if late > 1 else "",
                doing,
                now - self._since,
                advice,
            )
