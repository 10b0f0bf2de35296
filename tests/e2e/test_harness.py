"""The test harness detects differences, failures and hangs."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import STEPS, Reference
from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, Pretraining

TARGETS = """
import atexit, os, sys, threading, time, torch

def add_ranks():
    torch.distributed.init_process_group("gloo")
    total = torch.tensor([torch.distributed.get_rank() + 1])
    torch.distributed.all_reduce(total)
    print("sum", total.item())
    torch.distributed.destroy_process_group()

def fail_in_rank(rank):
    if os.environ["RANK"] == str(rank):
        raise RuntimeError("meant to fail")
    sleep()

def sleep():
    time.sleep(60)

def end(how):
    atexit.register(lambda: print("hook", getattr(sys, "last_value", None)))
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
    if how == "error":
        raise ValueError("meant to fail")
    sys.exit(how)
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankForge]:
    """Forks ranks without Megatron."""
    folder = tmp_path_factory.mktemp("module")
    (folder / "targets.py").write_text(TARGETS)
    with RankForge(["torch.distributed", "targets"], [folder]) as parent:
        yield parent


def test_runs_that_differ_in_their_seed_differ_in_their_state(
    pretraining: Pretraining, reference: Reference
) -> None:
    other = pretraining.run(*LAYOUTS["tp2"], "--train-iters", str(STEPS), "--seed", "7")
    unequal = other.differences(reference("tp2"))
    for part in ("model", "optimizer", "loss", "generator"):
        assert any(f": {part}" in name for name in unequal), f"{part} is not compared"


def test_run_repeats_itself_to_the_last_bit(pretraining: Pretraining, reference: Reference) -> None:
    again = pretraining.run(*LAYOUTS["tp2"], "--train-iters", str(STEPS))
    assert again.differences(reference("tp2")) == []


def test_a_rank_ends_as_python_does(plain: RankForge, tmp_path: Path) -> None:
    """Threads are waited for, then exit hooks are called, which see the error that ended the program."""
    for how, code in (("error", 1), (None, 0), (3, 3), ("a reason", 1)):
        outcome = plain.run("targets:end", ranks=1, logs=tmp_path / str(how), arguments=[how])
        assert outcome.exits == [code]
        error = "meant to fail" if how == "error" else "None"
        assert outcome.log.endswith(f"thread\nhook {error}\n")
        assert ("ValueError: meant to fail" in outcome.log) == (how == "error")
        assert ("a reason" in outcome.log) == (how == "a reason")


def test_ranks_find_each_other(plain: RankForge, tmp_path: Path) -> None:
    outcome = plain.run("targets:add_ranks", ranks=3, logs=tmp_path).succeeded()
    assert outcome.log.count("sum 6") == 3


def test_peers_of_a_failing_rank_are_killed(plain: RankForge, tmp_path: Path) -> None:
    outcome = plain.run("targets:fail_in_rank", ranks=2, logs=tmp_path, arguments=[1])
    assert outcome.exits == [-signal.SIGKILL, 1]
    assert "meant to fail" in outcome.log
    with pytest.raises(AssertionError, match="meant to fail"):
        outcome.succeeded()


def test_hanging_ranks_are_killed_and_their_stacks_shown(plain: RankForge, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"targets\.py.*in sleep"):
        plain.run("targets:sleep", ranks=1, logs=tmp_path, timeout_seconds=1)


def test_ranks_do_not_outlive_their_parent(tmp_path: Path) -> None:
    forge = RankForge(["time"])
    job = forge.start("time:sleep", ranks=1, logs=tmp_path, arguments=[60])
    (pid,) = job.pids
    forge.kill()
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.01)
