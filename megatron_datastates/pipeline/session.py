"""What all saves of a process share: the identity of saves, known layouts and plans, and who is unfinished.

Belongs here: what outlives a save whatever its options. Does not belong here: what depends on options, such
as an engine (saver.py).
"""

from __future__ import annotations

import secrets
import socket
import threading
from pathlib import Path

from megatron_datastates.config import Options
from megatron_datastates.errors import RanksDifferError
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publishing import rank_consistency
from megatron_datastates.pipeline.publishing.collectives import Collectives, gather_objects
from megatron_datastates.pipeline.publishing.layouts import LayoutStore
from megatron_datastates.pipeline.publishing.polls import Polls, Turn
from megatron_datastates.pipeline.saving.links import Links
from megatron_datastates.pipeline.saving.plans import Plans

_KEPT_PLANS = 8  # persistent and non-persistent saves alternate; more than a few means they change


class SaveSession:
    """The state that all saves of a process share. Used by one thread at a time, whose `turn` it is."""

    def __init__(self) -> None:
        self.plans = Plans(_KEPT_PLANS)
        self.turn = Turn()
        self.begun: list[Publication] = []  # all that may yet change something in their directories
        self.memory_wait_reported = False  # logged once
        self._publishing = threading.Lock()  # see LayoutStore
        self._published: tuple[int, Path | None] = 0, None  # the last one's ordinal, and its directory
        self.begin_world(Collectives())

    def enter_world(self) -> None:
        """Starts afresh if torch.distributed was initialized (again) since the last save.

        A Saver may exist before torch.distributed is initialized. After a restart within the process, ranks
        have new numbers and peers, so that nothing the old ones agreed on is valid.
        """
        if not self.collectives.is_current():
            self.begin_world(Collectives())

    def begin_world(self, collectives: Collectives) -> None:
        """Forgets all that ranks have agreed on."""
        self.collectives, self.polls = collectives, Polls(collectives, self.turn)
        self.layouts, self.links = LayoutStore(self._publishing), Links()
        self._published = 0, self._published[1]
        self._failed: list[int] = []  # the ordinals of later saves that have failed
        self._last: tuple[int, str] = 0, ""  # the ordinal of the training loop's last save, and its error
        self._run_id: int | None = None
        self._ordinal = 0

    def directories_at_work(self) -> list[Path]:
        """Returns the directories in which saves may yet change something. On any thread."""
        return [save.save.context.directory for save in self.begun if save.is_at_work]

    def agree(self, options: Options) -> None:
        """Draws the id of the run in this world, and compares releases and options; collective until then.

        Raises:
            RanksDifferError: ranks differ in what they need alike (rank_consistency.py). On all ranks.
        """
        if self._run_id is not None:
            return
        facts = rank_consistency.facts_of(options)
        digest = rank_consistency.digest_of(facts)
        run_id, are_alike = self.collectives.share_and_compare(secrets.randbits(63), digest)
        if not are_alike:
            raise RanksDifferError(rank_consistency.difference(gather_objects((socket.gethostname(), facts))))
        self._run_id = run_id

    def next_id(self) -> SaveId:
        """Returns the next save id, the same on every rank. They have agreed before."""
        assert self._run_id is not None, "agree comes first"
        self._ordinal += 1
        return SaveId(self._run_id, self._ordinal)

    def on_end(self, publication: Publication) -> None:
        """Counts failed saves. From the second one on, the errors say how many, on all ranks alike."""
        context = publication.save.context
        ordinal = context.save_id.ordinal
        if publication.outcome is Outcome.PUBLISHED:
            self._published = max(self._published, (ordinal, context.directory))
        elif publication.is_abandoned:  # not on all ranks alike
            return
        else:
            self._failed = [failed for failed in self._failed if failed > self._published[0]]
            self._failed.append(ordinal)
            if len(self._failed) > 1 and ordinal > self._published[0]:
                last = ", and none was published before"
                if self._published[1] is not None:
                    last = f" since {self._published[1].name} was published"
                publication.error = f"{publication.error} {len(self._failed)} saves have failed{last}."
        if publication.is_of_training:
            self._last = max(self._last, (ordinal, publication.error or ""))

    @property
    def last_error(self) -> str:
        """Returns why the training loop's last save has failed, on all ranks alike; empty if it has not."""
        return self._last[1]
