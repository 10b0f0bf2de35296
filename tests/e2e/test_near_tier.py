"""Checkpoints that are written to a near tier first: drained, brought home after a kill, lost with a node.

Each of the two ranks stands for a node: its near tier is a directory of its own.
"""

import shutil
from pathlib import Path

from tests.e2e.conftest import STEPS, Reference
from tests.support.tiny import LAYOUTS, MANIFEST, TRACKER, Checkpoints, Pretraining

SLOW = ["--datastates-drain-limit", "1KiB"]  # the first checkpoint becomes far, no other


class Nodes:
    """The near tiers of two nodes, and --save."""

    def __init__(self, tmp_path: Path) -> None:
        self.far = Checkpoints(tmp_path / "far" / "run")
        self.root = tmp_path / "near"

    def arguments(self, *more: str, layout: str = "tp2", steps: int = STEPS) -> list[str]:
        return [
            *(*LAYOUTS[layout], "--train-iters", str(steps), "--ckpt-format", "datastates", "--async-save"),
            *("--save", str(self.far.root), "--load", str(self.far.root), "--save-interval", "2"),
            *("--datastates-near", f"{self.root}-$RANK", *more),
        ]

    def tracked_near(self) -> int:
        return max(
            (int(path.read_text() or 0) for path in self.root.parent.glob(f"near-0/*/{TRACKER}")), default=0
        )

    def near(self, node: int) -> Checkpoints:
        (run,) = Path(f"{self.root}-{node}").iterdir()
        return Checkpoints(run)


def test_saves_are_drained_and_resumed_from(
    pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    nodes = Nodes(tmp_path)
    pretraining.run(*nodes.arguments("--exit-interval", "4"))
    assert nodes.far.published() == nodes.far.complete() == [2, 4]
    assert nodes.far.tracked() == 4
    for node in (0, 1):
        assert nodes.near(node).published() == [4], "one is kept"
        assert len(list(nodes.near(node).at(4).glob("data-*"))) == 1, "each node has its own"

    resumed = pretraining.run(*nodes.arguments())

    assert resumed.resumed_from(reference("tp2")) == 4
    assert resumed.differences(reference("tp2")) == []


def test_killed_run_resumes_from_what_only_the_near_tiers_have(
    pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    nodes = Nodes(tmp_path)
    killed = pretraining.start(*nodes.arguments(*SLOW, "--step-delay-ms", "300", steps=12))
    killed.job.wait_until(lambda: nodes.tracked_near() >= 4 and nodes.far.tracked() == 2, 60)
    killed.job.kill()
    assert nodes.far.published() == [2] and nodes.far.tracked() == 2
    newest = min(nodes.near(node).published()[-1] for node in (0, 1))

    resumed = pretraining.run(*nodes.arguments(steps=12))

    uninterrupted = reference("tp2", 12)
    assert f"iteration {newest} is newer than what is in" in resumed.log
    assert resumed.resumed_from(uninterrupted) == newest
    assert resumed.differences(uninterrupted) == []
    assert nodes.far.published()[:2] == [2, newest] and nodes.far.tracked() == 12
