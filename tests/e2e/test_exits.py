"""However Megatron's loop ends, the same checkpoints are left as with torch_dist, async saves included."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import Reference
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining, waits_in

STEPS = 12
MODES: dict[str, list[str]] = {
    "datastates": ["--ckpt-format", "datastates"],
    "datastates async": ["--ckpt-format", "datastates", "--async-save"],
}
STOCK = ["--ckpt-format", "torch_dist"]
EXITS: dict[str, list[str]] = {
    "interval, saved there": ["--exit-interval", "4"],
    "interval, not saved there": ["--exit-interval", "3"],
    "duration": ["--exit-duration-in-mins=-1"],  # has passed before the first step
    "last step": ["--train-iters", "5"],
}


@dataclass(frozen=True)
class Left:
    """The checkpoints that a run left, in any format, and the steps that it took."""

    complete: list[int]
    tracked: int | None
    steps_taken: int


def train(root: Path, *arguments: str) -> list[str]:
    saving = ["--save", str(root), "--load", str(root), "--save-interval", "2"]
    return [*LAYOUTS["tp2"], "--train-iters", str(STEPS), *saving, *arguments]


@pytest.fixture(scope="module")
def stock(forge, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Left]:
    """Returns what torch_dist leaves, by the way to exit."""
    folder = tmp_path_factory.mktemp("stock")
    pretraining, known = Pretraining(forge, folder / "runs"), dict[str, Left]()

    def of(way: str) -> Left:
        if way not in known:
            known[way] = run(pretraining, folder / way, [*STOCK, *EXITS[way]])
        return known[way]

    return of


def run(pretraining: Pretraining, root: Path, arguments: list[str]) -> Left:
    ending = pretraining.run(*train(root, *arguments))
    checkpoints = Checkpoints(root)
    return Left(checkpoints.complete(), checkpoints.tracked(), len(ending.ranks[0].states))


@pytest.mark.parametrize(
    ("way", "mode"), [*((way, "datastates async") for way in EXITS), ("last step", "datastates")]
)
def test_exit_leaves_what_torch_dist_leaves(
    way: str, mode: str, stock: Callable[[str], Left], pretraining: Pretraining, tmp_path: Path
) -> None:
    left = run(pretraining, tmp_path / "ck", [*MODES[mode], *EXITS[way]])
    assert left == stock(way)
    checkpoints = Checkpoints(tmp_path / "ck")
    assert checkpoints.published() == left.complete
    for iteration in left.complete:
        checkpoints.assert_format(iteration, "datastates")


@pytest.mark.conformance
@pytest.mark.parametrize("mode", [["--async-save"], []], ids=["async", "sync"])
def test_sigterm_in_mid_save_publishes_that_save_and_the_last_one(
    mode: list[str], pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    """Writes are slow; the signal comes after the save has created its files and before it is published."""

    def is_in_mid_save(limit: str) -> bool:
        checkpoints, is_signalled = Checkpoints(tmp_path / limit), tmp_path / f"signalled-{limit}"
        arguments = train(checkpoints.root, "--ckpt-format", "datastates", "--save-interval", "4", *mode)
        slow = ["--datastates-write-limit", limit, "--exit-signal-handler"]
        running = pretraining.start(*arguments, *slow, environment=waits_in(7, is_signalled))
        running.job.wait_until(lambda: any(checkpoints.at(4).glob("data-*")), timeout_seconds=60)
        in_time = checkpoints.published() == []
        os.kill(running.job.pids[1], signal.SIGTERM)  # to one rank only: Megatron passes it on
        is_signalled.touch()

        ending = running.finish()

        assert "exiting program after receiving SIGTERM" in ending.log
        last = checkpoints.tracked()
        assert last is not None and last < STEPS
        assert checkpoints.published() == checkpoints.complete() == sorted({*range(4, last, 4), last})
        assert "iteration       4 to" in ending.log  # the finalize functions of the interrupted save ran
        resumed = pretraining.run(*arguments)
        assert resumed.resumed_from(reference("tp2", STEPS)) == last
        assert resumed.differences(reference("tp2", STEPS)) == []
        return in_time

    assert any(map(is_in_mid_save, ("4MB", "1MB", "300kB"))), "each save was published before the signal"


def test_sigterm_before_any_save_leaves_one_checkpoint(pretraining: Pretraining, tmp_path: Path) -> None:
    endings = {}
    for name in ("torch_dist", "datastates"):
        checkpoints = Checkpoints(tmp_path / name)
        arguments = train(checkpoints.root, "--ckpt-format", name, "--save-interval", "1000")
        async_save = ["--async-save"] if name == "datastates" else []
        running = pretraining.start(
            *(*arguments, *async_save, "--exit-signal-handler", "--step-delay-ms", "100")
        )
        running.job.wait_until(lambda running=running: "iteration        2/" in running.job.log(), 60)
        for pid in running.job.pids:
            os.kill(pid, signal.SIGTERM)
        ending = running.finish()
        last = checkpoints.tracked()
        assert checkpoints.complete() == [last]
        checkpoints.assert_format(last, name)
        endings[name] = ending
    awaited = f"the run ends once the save to {checkpoints.at(last)}, and any after it, are over"
    assert endings["datastates"].log.count(awaited) == 1, "or it seems to hang"
    assert endings["datastates"].differences(endings["torch_dist"]) == []
