"""Checkpoints to be damaged: saved by two ranks, through Megatron, with our strategy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.support.ranks import RankForge

RANKS = 2


class Specimen(NamedTuple):
    iteration: int
    layout: str


# Iterations name directories. 1 is the one that is damaged; files of the others take the place of its own.
USUAL, SAME_LAYOUT, OTHER_LAYOUT, OTHER_RUN = (
    Specimen(1, "usual"),
    Specimen(2, "usual"),
    Specimen(3, "other"),
    Specimen(4, "usual"),
)
RUNS = [(USUAL, SAME_LAYOUT, OTHER_LAYOUT), (OTHER_RUN,)]  # each is a job of its own
ALL = [each for run in RUNS for each in run]


def place(root: Path, specimen: Specimen) -> Path:
    return root / f"iter_{specimen.iteration:07d}"


def make(forge: RankForge, root: Path) -> None:
    """Saves all of them under `root`."""
    for number in range(len(RUNS)):
        forge.run(
            "tests.faults.campaign.specimens:save",
            ranks=RANKS,
            logs=root.with_name(f"{root.name}-log{number}"),
            arguments=[str(root), number],
        ).succeeded()


def save(root: str, run: int) -> None:
    """Saves the specimens; runs in a rank."""
    import saving_rank

    from megatron_datastates.mcore import DataStatesSaveStrategy
    from tests.faults.campaign import patterns

    rank, ranks = saving_rank.join()
    strategy = DataStatesSaveStrategy()
    for specimen in RUNS[run]:
        state = patterns.sharded_state(specimen.iteration, specimen.layout, ranks, rank)
        saving_rank.save(place(Path(root), specimen), state, strategy, "sync")
