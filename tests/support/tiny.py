"""Tiny pretrainings for tests: launching one in some layout, and comparing how two of them went.

What belongs here: the arguments of a run and what it left behind, as the tests see them. What does
not: anything that imports torch (`tiny_rank.py` is what runs in the ranks).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.support.ranks import Job, Outcome, RankForge

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
PATH = (Path(__file__).parent, RECIPES, RECIPES / "cpu")
PRELOAD = ("stand_ins:install", "megatron.training", "tiny_rank")
RANKS = 2
LAYOUTS: dict[str, list[str]] = {
    "tp2": ["--tensor-model-parallel-size", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "dp2": [],
}
MANIFEST = "datastates.manifest"
TRACKER = "latest_checkpointed_iteration.txt"
# A data loader draws a seed from torch's generator when it is made, which is after a checkpoint was
# loaded: from there on, a stock resumed run has another state of it than an uninterrupted one.
DRAWN_BY_LOADER = "generator torch"


@dataclass(frozen=True)
class Told:
    """What one rank recorded: digests by name, when training began and at later moments.

    `facts` are `children` (names of processes that it ever had), `our modules` (that it had imported in
    the end) and `arguments` (as Megatron settled them).
    """

    begun_at: int
    begun: dict[str, str]
    states: dict[str, dict[str, str]]
    facts: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        told: dict[str, Any] = json.loads(path.read_text())
        begun = told["begun"]
        return cls(begun["iteration"], begun["state"], told["states"], told["facts"])


@dataclass(frozen=True)
class Ending:
    """How a run went on each rank, and what it printed."""

    ranks: list[Told]
    log: str

    def differences(self, other: "Ending") -> list[str]:
        """What was not the same to the last bit after the first step, of those that both took,
        where anything was not (or at the end). Empty: the two runs went alike."""
        for moment in _moments(self, other):
            unequal = [
                f"rank {rank}, {moment}: {name}"
                for rank, (ours, theirs) in enumerate(zip(self.ranks, other.ranks, strict=True))
                for name in _unequal(ours.states[moment], theirs.states[moment])
                if name != DRAWN_BY_LOADER
            ]
            if unequal:
                return unequal
        return []

    def resumed_from(self, other: "Ending") -> int:
        """The iteration this run resumed from, after a check that it began with the very state (all
        random generators included) that `other` had there."""
        for ours, theirs in zip(self.ranks, other.ranks, strict=True):
            then = theirs.states[f"step {ours.begun_at}"]
            unequal = [name for name in _unequal(ours.begun, then) if not name.startswith("loss")]
            assert not unequal, f"not loaded as it was at step {ours.begun_at}: {unequal}"
        return self.ranks[0].begun_at


def _moments(left: Ending, right: Ending) -> list[str]:
    """The moments that all ranks of both runs tell of, in order."""
    told = [rank.states.keys() for rank in (*left.ranks, *right.ranks)]
    common = [moment for moment in left.ranks[0].states if all(moment in keys for keys in told)]
    assert common, "these two runs took no step in common"
    return common


def _unequal(left: dict[str, str], right: dict[str, str]) -> list[str]:
    return [name for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]


@dataclass(frozen=True)
class Checkpoints:
    """A `--save` directory as a run left it."""

    root: Path

    def at(self, iteration: int) -> Path:
        return self.root / f"iter_{iteration:07d}"

    def published(self) -> list[int]:
        """Iterations whose checkpoint is committed, in order: those that hold a manifest."""
        return sorted(int(path.parent.name[5:]) for path in self.root.glob(f"iter_*/{MANIFEST}"))

    def complete(self) -> list[int]:
        """Iterations that were saved to the end, in order, in whatever format Megatron calls distributed."""
        return sorted(int(path.parent.name[5:]) for path in self.root.glob("iter_*/metadata.json"))

    def tracked(self) -> int | None:
        """The iteration that Megatron's tracker names, if there is one."""
        tracker = self.root / TRACKER
        text = tracker.read_text() if tracker.exists() else ""
        return int(text) if text else None

    def assert_format(self, iteration: int, expected: str) -> None:
        """This checkpoint was written by `expected`, and by nothing else."""
        metadata = json.loads((self.at(iteration) / "metadata.json").read_text())
        assert metadata["sharded_backend"] == expected
        files = sorted(path.name for path in self.at(iteration).iterdir())
        ours = expected == "datastates"
        assert (MANIFEST in files) == ours, files
        assert any(name.endswith(".distcp") for name in files) != ours, files


@dataclass(frozen=True)
class Running:
    """A run that was started, with the folder of its logs."""

    job: Job
    folder: Path

    def finish(self, timeout_seconds: float = 60.0) -> Ending:
        """Waits for its end, which has to be a good one."""
        log = self.job.wait(timeout_seconds).succeeded().log
        told = sorted(self.folder.glob("rank*.json"))
        assert len(told) == RANKS, f"not every rank trained; the log ends:\n{log[-2000:]}"
        return Ending([Told.read(path) for path in told], log)

    def fail(self, timeout_seconds: float = 60.0) -> Outcome:
        """Waits for its end, which every rank has to reach by itself."""
        return self.job.wait(timeout_seconds, spare_peers=True)


class Pretraining:
    """Launches tiny pretrainings of two ranks in forks of one parent, each in its own folder."""

    def __init__(self, forge: RankForge, folder: Path) -> None:
        self._forge, self._folder, self._runs = forge, folder, 0
        self._arguments = (RECIPES / "tiny.args").read_text().split()

    def start(self, *arguments: str | Path, environment: dict[str, str] | None = None) -> Running:
        """Starts a run with `recipes/tiny.args` and then these arguments, which win."""
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        instead = {"--bf16"} if "--fp16" in arguments else set()  # Megatron takes one of them
        everything = [name for name in self._arguments if name not in instead] + list(map(str, arguments))
        job = self._forge.start(
            "tiny_rank:main",
            ranks=RANKS,
            logs=folder,
            arguments=[everything, str(folder)],
            environment=environment,
        )
        return Running(job, folder)

    def run(
        self,
        *arguments: str | Path,
        timeout_seconds: float = 60.0,
        environment: dict[str, str] | None = None,
    ) -> Ending:
        """Runs to the end, which has to be a good one."""
        return self.start(*arguments, environment=environment).finish(timeout_seconds)

    def fail(self, *arguments: str | Path, environment: dict[str, str] | None = None) -> Outcome:
        """Runs to an end that need not be a good one; no rank may hang."""
        return self.start(*arguments, environment=environment).fail()
