"""The harness sees what it is there to see: differences, failures and hangs."""

import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import STEPS, Reference
from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, Pretraining


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RankForge:
    """A parent for ranks that know nothing but this one module."""
    folder = tmp_path_factory.mktemp("module")
    (folder / "targets.py").write_text(
        "import os, sys, time\n"
        "def add_ranks():\n"
        "    import torch, torch.distributed as dist\n"
        "    dist.init_process_group('gloo')\n"
        "    total = torch.tensor([dist.get_rank() + 1])\n"
        "    dist.all_reduce(total)\n"
        "    print('sum', total.item())\n"
        "    dist.destroy_process_group()\n"
        "def fail_in_rank(rank):\n"
        "    if os.environ['RANK'] == str(rank): raise RuntimeError('meant to fail')\n"
        "    time.sleep(60)\n"
        "def sleep():\n"
        "    time.sleep(60)\n"
    )
    return RankForge(["targets"], [folder])


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


def test_ranks_find_each_other(plain: RankForge, tmp_path: Path) -> None:
    outcome = plain.run("targets:add_ranks", ranks=3, logs=tmp_path).succeeded()
    assert outcome.log.count("sum 6") == 3


def test_failing_rank_takes_its_peers_along(plain: RankForge, tmp_path: Path) -> None:
    outcome = plain.run("targets:fail_in_rank", ranks=2, logs=tmp_path, arguments=[1])
    assert outcome.exits == [-signal.SIGKILL, 1]
    assert "meant to fail" in outcome.log
    with pytest.raises(AssertionError, match="meant to fail"):
        outcome.succeeded()


def test_hanging_ranks_are_killed_and_tell_where_they_were(plain: RankForge, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"targets\.py.*in sleep"):
        plain.run("targets:sleep", ranks=1, logs=tmp_path, timeout_seconds=0.5)
