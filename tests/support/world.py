"""The tests' side of saving_rank.py: runs its functions in forked ranks and returns their reports."""

import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.support.ranks import Outcome, RankForge
from tests.support.tiny import RECIPES

HERE = Path(__file__).parent
# Before 0.19 Megatron writes the common state itself, before it calls a strategy.
FILES_OF_MEGATRON = {"common.pt"} if metadata.version("megatron-core") < "0.19" else set()
PATH = (HERE, RECIPES, RECIPES / "cpu", HERE.parent / "multirank", HERE.parent / "faults")
PRELOAD = (
    *("stand_ins:install", "quick_megatron:install", "saving_rank", "model_ranks"),
    "megatron_datastates.mcore.save.strategy",
)


class World:
    """Runs functions of the modules on PATH in forked ranks, each run in its own folder."""

    def __init__(self, forge: RankForge, folder: Path) -> None:
        self._forge, self._folder, self._runs = forge, folder, 0

    def run(
        self, target: str, *arguments: Any, ranks: int = 2, timeout_seconds: float = 60.0
    ) -> list[dict[str, Any]]:
        """Runs `target` ("module:function") and returns what each rank reported.

        Raises AssertionError unless every rank exits with 0. The folder for the reports is appended to the
        arguments of the target.
        """
        folder = self._next_folder()
        outcome = self._start(target, folder, arguments, ranks, timeout_seconds)
        outcome.succeeded()
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    def run_to_end(self, target: str, *arguments: Any, ranks: int = 2) -> None:
        """Does as `run` for ranks that need not report anything."""
        self._start(target, self._next_folder(), arguments, ranks, 60.0).succeeded()

    def run_to_death(self, target: str, *arguments: Any, ranks: int = 2) -> Outcome:
        """Does as `run` for a job in which a rank is killed; its peers are then killed, too."""
        return self._start(target, self._next_folder(), arguments, ranks, 60.0)

    def _next_folder(self) -> Path:
        self._runs += 1
        return self._folder / f"run{self._runs}"

    def _start(
        self, target: str, folder: Path, arguments: Sequence[Any], ranks: int, timeout_seconds: float
    ) -> Outcome:
        everything = [*(str(a) if isinstance(a, Path) else a for a in arguments), str(folder)]
        return self._forge.run(
            target, ranks=ranks, logs=folder, arguments=everything, timeout_seconds=timeout_seconds
        )
