"""Saves by the whole pipeline, as a training loop makes them: start, fence, polls.

Every save goes through pipeline.saver.Saver, so that all that a trainer waits for counts: collecting
the tensors, looking up the layout, the native call, the fence and the polls. The front door (`ds.async_save`)
would not do: it keeps its staging memory until the process ends, and benchmarks compare one size of it with
another, wait until it is page-locked, and time the steps within a save.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from megatron_datastates.config import Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.providers.base import StateProvider

_numbers = itertools.count(1)


class Saves:
    """Saves states with one Saver, each into a new directory inside `folder`."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.saver = Saver(options, SaveSession())
        self._folder = folder

    def start(self, provider: StateProvider) -> Publication:
        """Starts a save, as a trainer does."""
        return self.saver.start(self._folder / f"save-{next(_numbers)}", provider)

    def fence(self) -> None:
        """Waits as an optimizer step does."""
        FENCE.wait("the benchmark")

    def keep(self, provider: StateProvider) -> Path:
        """Saves, waits until the save is published, and returns its directory."""
        publication = self.start(provider)
        self.fence()
        publication.wait()
        expect_published(publication)
        publication.join()
        return publication.save.context.directory

    def discard(self, publication: Publication) -> None:
        """Abandons a save if it is not yet published, and removes all that it wrote."""
        publication.abandon("it was measured")
        publication.join()
        shutil.rmtree(publication.save.context.directory, ignore_errors=True)

    def close(self) -> None:
        """Ends the engine's threads."""
        self.saver.close()


def expect_published(publication: Publication) -> None:
    """Raises RuntimeError if the save was not published."""
    if publication.outcome is not Outcome.PUBLISHED:
        directory = publication.save.context.directory
        raise RuntimeError(
            f"the save to {directory} is {publication.outcome.value}, not published: {publication.error}"
        )
