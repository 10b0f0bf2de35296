"""Tiny pretrainings for tests: launching one in some layout, and comparing two of them.

What belongs here: the arguments of a run, what it recorded, and the checkpoints that it left. What
does not: anything that imports torch (`tiny_rank.py` is what runs in the ranks).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.support.ranks import Job, Outcome, RankForge

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
PATH = (Path(__file__).parent, RECIPES, RECIPES / "cpu")
PRELOAD = ("stand_ins:install", "megatron.training", "quick_megatron:install", "tiny_rank")
RANKS = 2
LAYOUTS: dict[str, list[str]] = {
    "tp2": ["--tensor-model-parallel-size", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "dp2": [],
}
MANIFEST = "datastates.manifest"
TRACKER = "latest_checkpointed_iteration.txt"
# Megatron makes its data loaders after loading a checkpoint, and each draws a seed from torch's generator:
# from there on, the generator of a resumed run differs from that of an uninterrupted one, with any format.
DRAWN_BY_LOADER = "generator torch"


@dataclass(frozen=True)
class RankRecord:
    """What one rank recorded: digests by name, when training began and at later moments.

    `facts` are `children` (names of the child processes seen), `device memory released after` (the numbers of
    the steps after which torch was to empty its cache), `our modules` (modules of this package that
    were imported at the end) and `arguments` (as Megatron settled them).
    """

    begun_at: int
    begun: dict[str, str]
    states: dict[str, dict[str, str]]
    facts: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        record: dict[str, Any] = json.loads(path.read_text())
        begun = record["begun"]
        return cls(begun["iteration"], begun["state"], record["states"], record["facts"])


@dataclass(frozen=True)
class Ending:
    """What each rank of a finished run recorded, and what the run printed."""

    ranks: list[RankRecord]
    log: str

    def differences(self, other: "Ending") -> list[str]:
        """Returns what differed, bit for bit, at the first moment (a step that both took, or the end) at
        which anything differed. Empty if the two runs were identical."""
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
        """Returns the iteration that this run resumed from, after checking that it began with exactly the
        state (random generators included) that `other` had after that step."""
        for ours, theirs in zip(self.ranks, other.ranks, strict=True):
            then = theirs.states[f"step {ours.begun_at}"]
            unequal = [name for name in _unequal(ours.begun, then) if not name.startswith("loss")]
            assert not unequal, f"loaded state differs from step {ours.begun_at}: {unequal}"
        return self.ranks[0].begun_at


def _moments(left: Ending, right: Ending) -> list[str]:
    """Returns the moments that all ranks of both runs recorded, in order."""
    recorded = [rank.states.keys() for rank in (*left.ranks, *right.ranks)]
    common = [moment for moment in left.ranks[0].states if all(moment in keys for keys in recorded)]
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
        """Returns the iterations with a published checkpoint (one with a manifest), in order."""
        return sorted(int(path.parent.name[5:]) for path in self.root.glob(f"iter_*/{MANIFEST}"))

    def complete(self) -> list[int]:
        """Returns the iterations with a complete checkpoint in any distributed format, in order."""
        return sorted(int(path.parent.name[5:]) for path in self.root.glob("iter_*/metadata.json"))

    def tracked(self) -> int | None:
        """Returns the iteration in Megatron's tracker file, None if there is none."""
        tracker = self.root / TRACKER
        text = tracker.read_text() if tracker.exists() else ""
        return int(text) if text else None

    def assert_format(self, iteration: int, expected: str) -> None:
        """Checks that the checkpoint was written in format `expected` and holds no files of another."""
        metadata = json.loads((self.at(iteration) / "metadata.json").read_text())
        assert metadata["sharded_backend"] == expected
        files = sorted(path.name for path in self.at(iteration).iterdir())
        ours = expected == "datastates"
        assert (MANIFEST in files) == ours, files
        assert any(name.endswith(".distcp") for name in files) != ours, files


@dataclass(frozen=True)
class Running:
    """A started run and the folder of its logs."""

    job: Job
    folder: Path
    ranks: int = RANKS

    def finish(self, timeout_seconds: float = 60.0) -> Ending:
        """Waits for the run, which must succeed, and returns what it recorded."""
        log = self.job.wait(timeout_seconds).succeeded().log
        records = sorted(self.folder.glob("rank*.json"))
        assert len(records) == self.ranks, (
            f"{len(records)} ranks trained, expected {self.ranks}; the log ends:\n{log[-2000:]}"
        )
        return Ending([RankRecord.read(path) for path in records], log)

    def fail(self, timeout_seconds: float = 60.0) -> Outcome:
        """Waits until every rank has ended by itself, with any exit code."""
        return self.job.wait(timeout_seconds, spare_peers=True)


def waits_in(step: int, file: str | Path = "") -> dict[str, str]:
    """Returns the environment of a run whose ranks wait in this step until a file exists.

    Without one, they finalize saves until they are killed.
    """
    return {"TINY_WAITS": f"{step} {file}"}


class Pretraining:
    """Launches tiny pretrainings, of two ranks by default, forked from one parent, each in its own folder."""

    def __init__(
        self, forge: RankForge, folder: Path, target: str = "tiny_rank:main", ranks: int = RANKS
    ) -> None:
        self._forge, self._folder, self._runs, self._target, self._ranks = forge, folder, 0, target, ranks
        self._arguments = (RECIPES / "tiny.args").read_text().split()

    def start(
        self,
        *arguments: str | Path,
        environment: dict[str, str] | None = None,
        without: Iterable[str] = (),
    ) -> Running:
        """Starts a run with `recipes/tiny.args`, except `without`, and these arguments, which win."""
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        # Megatron accepts only one of each pair.
        pairs = {"--fp16": "--bf16", "--use-torch-fsdp2": "--use-distributed-optimizer"}
        instead = {pairs[name] for name in arguments if name in pairs}.union(without)
        everything = [name for name in self._arguments if name not in instead] + list(map(str, arguments))
        job = self._forge.start(
            self._target,
            ranks=self._ranks,
            logs=folder,
            arguments=[everything, str(folder)],
            environment=environment,
        )
        return Running(job, folder, self._ranks)

    def run(
        self,
        *arguments: str | Path,
        timeout_seconds: float = 60.0,
        environment: dict[str, str] | None = None,
        without: Iterable[str] = (),
    ) -> Ending:
        """Starts a run and waits for it; it must succeed."""
        running = self.start(*arguments, environment=environment, without=without)
        return running.finish(timeout_seconds)

    def fail(self, *arguments: str | Path, environment: dict[str, str] | None = None) -> Outcome:
        """Starts a run and waits until every rank has ended, with any exit code; none may hang."""
        return self.start(*arguments, environment=environment).fail()
