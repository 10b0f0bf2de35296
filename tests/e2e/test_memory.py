"""What stays in a process's memory of its saves: nothing that grows with their number."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.tiny import PATH, PRELOAD, Pretraining

FIRST, LAST = 30, 110  # steps, with a save after each
MOST = 60  # objects of a type: fewer than there are saves, since some are under way at the first count


@pytest.fixture(scope="module")
def memory_forge() -> Iterator[RankForge]:
    with RankForge((*PRELOAD, "memory_rank"), (Path(__file__).parent, *PATH)) as parent:
        yield parent


@pytest.mark.long
@pytest.mark.parametrize("tier", ["near", "far"])
def test_saves_leave_no_objects_in_memory(tier: str, memory_forge: RankForge, tmp_path: Path) -> None:
    near = ["--datastates-near", tmp_path / "near"] if tier == "near" else []
    steps = str(LAST + 2)
    running = Pretraining(memory_forge, tmp_path / "runs", "memory_rank:main").start(
        *("--train-iters", steps, "--lr-decay-iters", steps, "--save-interval", "1"),
        *("--save", tmp_path / "c", "--save-retain-interval", "10", *near),
        *("--ckpt-format", "datastates", "--async-save"),
        *("--datastates-report-file", tmp_path / "report.jsonl"),
        environment={"COUNTED": f"{FIRST} {LAST} {MOST}"},
    )
    running.job.wait(120).succeeded()

    for rank in (0, 1):
        grown = json.loads((running.folder / f"grown{rank}.json").read_text())
        kept = {name: number for name, number in grown.items() if number >= MOST}
        assert not kept, f"rank {rank} kept objects of {LAST - FIRST} saves"
