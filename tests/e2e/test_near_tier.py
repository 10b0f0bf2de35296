"""Checkpoints that are written to a near tier first: drained, brought home after a kill, lost with a node.

Each of the two ranks stands for a node: its near tier is a directory of its own.
"""

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import STEPS, Reference
from tests.support.exchange import exchange
from tests.support.ranks import Job, RankForge
from tests.support.tiny import LAYOUTS, MANIFEST, TRACKER, Checkpoints, Pretraining, waits_in

SLOW = ["--datastates-drain-limit", "1KiB"]  # the first checkpoint becomes far, no other

PLACES = ("far", "near-0", "near-1")  # --save, and the near tiers
NEVER = ["--datastates-drain-every", "1000"]  # of a job that is killed, no checkpoint becomes far


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

    def near(self, node: int) -> Checkpoints:
        (run,) = Path(f"{self.root}-{node}").iterdir()
        return Checkpoints(run)


def published(job: Job) -> int:
    """Returns the newest iteration that a job has published near, by Megatron's line."""
    found = re.findall(r"successfully saved checkpoint from iteration +([0-9]+)", job.log())
    return max(map(int, found), default=0)


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


@pytest.fixture(scope="module")
def killed_once(forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the nodes of a killed run: iteration 2 is far, and newer ones are near."""
    folder = tmp_path_factory.mktemp("killed")
    nodes, pretraining = Nodes(folder), Pretraining(forge, folder / "runs")
    how = nodes.arguments(*SLOW, "--step-delay-ms", "300", steps=12)
    killed = pretraining.start(*how, environment=waits_in(12))
    killed.job.wait_until(lambda: published(killed.job) >= 4 and nodes.far.tracked() == 2, 60)
    killed.job.kill()
    assert nodes.far.published() == [2] and nodes.far.tracked() == 2
    for name in PLACES:
        shutil.copytree(folder / name, folder / "kept" / name)
    return folder


@pytest.fixture
def killed(killed_once: Path) -> Nodes:
    """Returns the nodes of that run, in the same place: names in a near tier depend on it."""
    for name in PLACES:
        shutil.rmtree(killed_once / name, ignore_errors=True)
        shutil.copytree(killed_once / "kept" / name, killed_once / name)
    return Nodes(killed_once)


def test_killed_run_resumes_from_what_only_the_near_tiers_have(
    killed: Nodes, pretraining: Pretraining, reference: Reference
) -> None:
    nodes = killed
    newest = newest_whole(nodes)

    resumed = pretraining.run(*nodes.arguments(steps=12))

    uninterrupted = reference("tp2", 12)
    assert f"iteration {newest} is newer than what is in" in resumed.log
    assert resumed.resumed_from(uninterrupted) == newest
    assert resumed.differences(uninterrupted) == []
    assert nodes.far.published()[:2] == [2, newest] and nodes.far.tracked() == 12


def test_arguments_of_a_checkpoint_that_only_near_tiers_had_take_a_second_start(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """Megatron reads arguments before it starts torch.distributed: the run would go on with its own."""
    nodes = Nodes(tmp_path)
    pretraining.run(*nodes.arguments("--exit-interval", "2", "--rotary-base", "500"))
    shutil.rmtree(nodes.far.root)
    again = nodes.arguments("--use-checkpoint-args")
    outcome = pretraining.fail(*again)
    assert outcome.exits == [1, 1]
    assert f"--use-checkpoint-args: {nodes.far.root} had no checkpoint when Megatron" in outcome.log
    resumed = pretraining.run(*again)
    assert resumed.ranks[0].begun_at == 2
    assert "Setting rotary_base to 500 from checkpoint" in resumed.log


@pytest.mark.conformance
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_killed_run_resumes_from_its_near_tiers_in_another_layout(
    killed: Nodes, pretraining: Pretraining, tmp_path: Path, layout: str
) -> None:
    nodes, plain = killed, Checkpoints(tmp_path / "plain")
    newest = newest_whole(nodes)

    resumed = pretraining.run(*nodes.arguments(layout=layout, steps=12))

    assert f"iteration {newest} is newer than what is in" in resumed.log
    shutil.copytree(nodes.far.at(newest), plain.at(newest))
    (plain.root / TRACKER).write_text(str(newest))
    expected = pretraining.run(
        *(*LAYOUTS[layout], "--train-iters", "12", "--ckpt-format", "datastates"),
        *("--save", str(plain.root), "--load", str(plain.root), "--save-interval", "2"),
    )
    assert [rank.begun_at for rank in resumed.ranks] == [newest] * 2
    assert [rank.begun for rank in resumed.ranks] == [rank.begun for rank in expected.ranks]
    assert resumed.differences(expected) == []


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_saves_go_on_near_while_save_is_gone(
    mode: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    nodes = Nodes(tmp_path)
    how = nodes.arguments("--step-delay-ms", "300", steps=12)
    if mode == "sync":
        how.remove("--async-save")
    running = pretraining.start(*how)
    running.job.wait_until(lambda: nodes.far.tracked() == 2, 60)
    gone = tmp_path / "gone"
    gone.write_text("not a directory")
    exchange(nodes.far.root, gone)
    reached = published(running.job)
    running.job.wait_until(lambda: published(running.job) >= reached + 4, 60)
    exchange(nodes.far.root, gone)
    ended = running.finish(120)

    assert ended.differences(reference("tp2", 12)) == []
    assert nodes.far.tracked() == 12 and nodes.far.published()[-1] == 12


def newest_whole(nodes: Nodes, left: tuple[int, ...] = (0, 1)) -> int:
    """Returns the newest iteration with a manifest and a file of each rank, far or on a node that is left."""
    whole = [0]
    for iteration in range(2, 13, 2):
        places = [nodes.far.at(iteration), *(nodes.near(node).at(iteration) for node in left)]
        manifests = [place / MANIFEST for place in places if (place / MANIFEST).exists()]
        named = {name for path in manifests for name in path.read_text().split('"') if name.endswith(".bin")}
        found = {path.name for place in places for path in place.glob("data-*.bin")}
        if manifests and named <= found:
            whole.append(iteration)
    return whole[-1]


def test_a_lost_node_costs_what_is_not_far(
    killed: Nodes, pretraining: Pretraining, reference: Reference
) -> None:
    nodes = killed
    shutil.rmtree(f"{nodes.root}-1")

    resumed = pretraining.run(*nodes.arguments("--exit-interval", "4", steps=12))

    assert "is skipped: no near tier has data-00001-" in resumed.log
    assert resumed.resumed_from(reference("tp2", 12)) == 2
    assert resumed.differences(reference("tp2", 12)) == []
    assert nodes.far.published() == [2, 4] and nodes.far.tracked() == 4


@pytest.mark.long
@pytest.mark.parametrize("lost", [1, 0])
def test_with_copies_on_other_nodes_a_lost_node_costs_nothing(
    lost: int, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    nodes = Nodes(tmp_path)
    how = nodes.arguments("--datastates-near-replicas", "1", steps=12)
    killed = pretraining.start(*how, *SLOW, "--step-delay-ms", "300", environment=waits_in(12))
    killed.job.wait_until(lambda: published(killed.job) >= 4 and nodes.far.tracked() == 2, 60)
    killed.job.kill()
    newest = newest_whole(nodes, (1 - lost,))
    assert newest >= 4 and nodes.far.published() == [2]
    shutil.rmtree(f"{nodes.root}-{lost}")

    resumed = pretraining.run(*how)

    uninterrupted = reference("tp2", 12)
    assert f"iteration {newest} is newer than what is in" in resumed.log
    assert "1 of them taken from copies on other nodes" in resumed.log
    assert resumed.resumed_from(uninterrupted) == newest
    assert resumed.differences(uninterrupted) == []
    assert nodes.far.tracked() == 12


@pytest.mark.long
def test_two_nodes_are_replaced_one_after_the_other(
    pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    """As docs/operations.md says: stop, replace the first, let the job save once, then the second."""
    nodes = Nodes(tmp_path)
    how = nodes.arguments("--datastates-near-replicas", "1", "--step-delay-ms", "300", steps=12)
    reached = 0
    for replaced in (None, 1, 0):
        if replaced is not None:
            shutil.rmtree(f"{nodes.root}-{replaced}")  # the node in its place has nothing
        running = pretraining.start(*how, *NEVER, environment=waits_in(12))
        running.job.wait_until(lambda job=running.job, before=reached: published(job) >= before + 2, 60)
        running.job.kill()
        reached = published(running.job)
        for node in (0, 1):
            assert newest_whole(nodes, (node,)) >= reached, "copies are made again"
    newest = newest_whole(nodes)

    resumed = pretraining.run(*how)

    assert resumed.ranks[0].begun_at == newest >= reached >= 6
    assert resumed.differences(reference("tp2", 12)) == []


@pytest.mark.long
def test_a_job_resumes_on_its_nodes_in_another_order_and_with_one_that_comes_back(
    pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    nodes = Nodes(tmp_path)
    how = nodes.arguments("--step-delay-ms", "300", steps=12)
    killed = pretraining.start(*how, *NEVER, environment=waits_in(12))
    killed.job.wait_until(lambda: published(killed.job) >= 4, 60)
    killed.job.kill()
    newest = newest_whole(nodes)
    away = tmp_path / "away"
    Path(f"{nodes.root}-1").rename(away)
    without = pretraining.start(*how, *NEVER, "--save-interval", "100")
    without.job.wait_until(lambda: "is skipped: no near tier has data-00001-" in without.job.log(), 60)
    without.job.kill()  # before it has saved anything
    shutil.rmtree(f"{nodes.root}-1", ignore_errors=True)
    Path(f"{nodes.root}-0").rename(f"{nodes.root}-1")
    away.rename(f"{nodes.root}-0")

    resumed = pretraining.run(*how)

    assert f"iteration {newest} is newer than what is in" in resumed.log
    assert resumed.resumed_from(reference("tp2", 12)) == newest
    assert resumed.differences(reference("tp2", 12)) == []


@pytest.mark.parametrize(
    "fault",
    [
        "drain write:2:kill",
        "drain rename:2:kill",
        "rename manifest:3:kill",
        "durable manifest:3:kill",
        "write index:2:kill",
        "rename manifest:2:kill",
        "drain sync:1:kill",
        "write manifest:4:kill",
        "write:3:kill",
        "sync:2:kill",
        "drain read:2:kill",
    ],
)
def test_killed_at_any_stage_a_run_resumes_from_the_newest_whole_checkpoint(
    fault: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    nodes = Nodes(tmp_path)
    how = nodes.arguments("--step-delay-ms", "200", steps=12)
    killed = pretraining.start(*how, environment={"MEGATRON_DATASTATES_FAULTS": fault})
    outcome = killed.job.wait(60)
    assert -9 in outcome.exits
    newest = newest_whole(nodes)
    assert nodes.far.tracked() is None or nodes.far.tracked() in nodes.far.published()

    resumed = pretraining.run(*nodes.arguments(steps=12))

    assert newest == 0 or resumed.resumed_from(reference("tp2", 12)) == newest
    assert resumed.differences(reference("tp2", 12)) == []
    assert nodes.far.tracked() == 12 and 12 in nodes.far.published()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ranks_of_one_node_share_its_tier_and_retention_follows_what_is_far(
    mode: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    far = Checkpoints(tmp_path / "far")
    how = ["--ckpt-format", "datastates", "--train-iters", str(STEPS), "--save-interval", "1"]
    how += ["--save", str(far.root), "--load", str(far.root), "--save-retain-interval", "2"]
    how += ["--datastates-near", str(tmp_path / "near")] + (["--async-save"] if mode == "async" else [])
    pretraining.run(*LAYOUTS["pp2"], *how, "--exit-interval", "5")
    assert far.published() == [2, 4, 5] and far.tracked() == 5
    (run,) = (tmp_path / "near").iterdir()
    assert Checkpoints(run).published() == [5]
    assert len(list(Checkpoints(run).at(5).glob("data-*"))) == 2

    resumed = pretraining.run(*LAYOUTS["dp2"], *how, "--exit-interval", "6")

    assert resumed.ranks[0].begun_at == 5
    assert far.published() == [2, 4, 6] and far.tracked() == 6


def test_what_retention_keeps_is_drained_whatever_a_job_has_saved_before(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """A job counts its own saves, so that after a restart every third one is another iteration."""
    nodes = Nodes(tmp_path)
    how = ["--save-interval", "1", "--save-retain-interval", "2", "--datastates-drain-every", "3"]
    pretraining.run(*nodes.arguments(*how, "--exit-interval", "4", steps=8))
    assert nodes.far.published() == [2, 4] and nodes.far.tracked() == 4
    pretraining.run(*nodes.arguments(*how, "--exit-interval", "7", steps=8))
    assert nodes.far.published() == [2, 4, 6, 7] and nodes.far.tracked() == 7
