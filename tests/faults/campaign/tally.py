"""What a part of the campaign found: how many rounds ended in which way, and what must never happen."""

from __future__ import annotations

import collections
import dataclasses
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.ranks import RankForge


@dataclasses.dataclass
class Tally:
    """Counts of one part. A violation fails the campaign; its text names what repeats it."""

    part: str
    rounds: int = 0
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    violations: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def violate(self, round_: int, what: str) -> None:
        self.violations.append(f"{self.part} round {round_}: {what}")


@dataclasses.dataclass(frozen=True)
class Campaign:
    """What all parts share."""

    seed: int
    folder: Path  # each part makes a folder of its own in it
    forge: RankForge  # forks ranks that have imported torch and Megatron
    rounds: int | None = None  # in place of a part's own number
    only: int | None = None  # this round alone: how a violation is repeated
    minutes: float | None = None  # after which a part begins no more rounds

    def each_round(self, tally: Tally, default: int) -> Iterator[tuple[int, random.Random]]:
        """Yields (round, its own random numbers), which depend on nothing but seed, part and round."""
        start = time.monotonic()
        total = self.rounds if self.rounds is not None else default
        for round_ in [self.only] if self.only is not None else range(total):
            if self.minutes is not None and time.monotonic() - start > self.minutes * 60:
                tally.count(f"not all of {total} rounds: the time was over")
                return
            yield round_, random.Random(f"{self.seed}/{tally.part}/{round_}")
            tally.rounds += 1
            tally.seconds = time.monotonic() - start

    def play(self, part: str, default: int, play: Callable[[Tally, int, random.Random, Path], None]) -> Tally:
        """Plays each round in a folder of its own; an error is a violation."""
        tally = Tally(part)
        for round_, rng in self.each_round(tally, default):
            folder = self.folder / part / str(round_)
            try:
                play(tally, round_, rng, folder)
            except Exception as error:
                tally.violate(round_, f"{type(error).__name__}: {error}")
            shutil.rmtree(folder, ignore_errors=True)
        return tally


Part = Callable[[Campaign], Tally]
