"""The model's values: who takes part (`Model`), and where everybody is (`State`)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tests.model.files import DURABLE, MANIFEST, OLD, Directory, Files


@dataclasses.dataclass(frozen=True)
class Model:
    """Who takes part, what may fail, and what is changed in the protocol (`mutants`)."""

    saves: tuple[tuple[str, ...], ...] = (("a1", "a2"), ("b1", "b2"))  # of each run, in order
    same_run: bool = False  # both runs are one run, whose later saves are the second's
    old: bool = True  # the directory holds a checkpoint at the start
    prune: str = ""  # "", "checkpoint" or "left-overs"
    faults: int = 1  # in one behaviour
    faulty: tuple[int, ...] = (0, 1)  # runs that may have a fault; one is enough if the runs do the same
    mutants: frozenset[str] = frozenset()

    def data(self, save: str) -> tuple[str, ...]:
        return (f"data-0-{save}", f"data-1-{save}")

    def index(self, save: str) -> str:
        if "index name is shared" in self.mutants:
            return "index-1" if save.startswith("a") else "index-2"
        return f"index-{save}"

    def files(self, save: str) -> tuple[str, ...]:
        return (*self.data(save), self.index(save))

    def temporary(self, save: str) -> str:
        return "temporary" if "temporary name is shared" in self.mutants else f"temporary-{save}"

    def owner(self, name: str) -> str:
        """Returns the save that made a file."""
        return name.rpartition("-")[2]

    def earlier(self, save: str) -> tuple[str, ...]:
        """Returns the earlier saves of the same run."""
        mine = self.saves[0] + self.saves[1] if self.same_run else next(s for s in self.saves if save in s)
        return mine[: mine.index(save)]

    def start(self) -> State:
        files = Files(())
        if self.old:
            for name in self.files(OLD):
                files.put(name, DURABLE)
            files.put(MANIFEST, f"{OLD} {DURABLE}")
            files.sync()
        runs = tuple(Run() if saves else Run(at="ended") for saves in self.saves)
        prune = Prune("look" if self.prune else "ended")
        return State(files.frozen(), runs, prune, self.faults, OLD if self.old else "")


class Run(NamedTuple):
    """Where a run is; it is in the nth of its saves."""

    nth: int = 0
    at: str = "ranks write"  # or a step of the publishing thread, "abandon", "ended", "dead"
    ranks: tuple[str, str] = ("begun", "begun")  # "made", "synced", "durable"; "failed"
    renamed: bool = False  # its manifest
    replaced: str | None = None  # the save named by the manifest that it is about to replace
    todo: tuple[str, ...] = ()
    failed_late: bool = False  # its ranks agreed on a failure after its publishing thread began


class Prune(NamedTuple):
    """Where `datastates prune` is."""

    at: str = "ended"
    decided: str | None = None  # the save named by the manifest when prune listed the directory
    todo: tuple[str, ...] = ()


class State(NamedTuple):
    """The directory and everybody who works in it."""

    directory: Directory
    runs: tuple[Run, ...]
    prune: Prune
    faults_left: int
    vouched: str  # the last save that reported success, or the old checkpoint; "" if none
    broken: str = ""  # the rule that a step broke


def may_fail(model: Model, state: State, number: int) -> bool:
    return state.faults_left > 0 and number in model.faulty


def with_run(state: State, number: int, run: Run, files: Files | None = None) -> State:
    runs = (*state.runs[:number], run, *state.runs[number + 1 :])
    return state._replace(runs=runs, directory=files.frozen() if files else state.directory)


def is_taken(state: State) -> bool:
    """Returns whether prune has renamed a manifest and not yet read it, or not yet durably put it back."""
    return state.prune.at in ("compare", "put back", "sync back")
