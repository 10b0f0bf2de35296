"""Megatron-Bridge's own training, from its released wheel: `make test-frameworks` installs it."""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankForge
from tests.support.world import PATH, World

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None,
    reason="megatron-bridge is not installed: make test-frameworks",
)
MANAGER = "megatron_datastates.mcore.bridge.CheckpointManager"
TP2 = {"tensor_model_parallel_size": 2}
ASYNC = {"async_save": True, "async_strategy": "mcore"}
SWITCH = {"MEGATRON_DATASTATES_ENABLE": "1"}
CASES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, str]]] = {
    "the name of the format, asynchronous": ({"ckpt_format": "datastates", **ASYNC}, TP2, {}),
    "the name of the format, synchronous": ({"ckpt_format": "datastates"}, {}, {}),
    "our manager, asynchronous": ({"custom_manager_class": MANAGER, **ASYNC}, {}, {}),
    "the environment switch": ({}, TP2, SWITCH),
}


@pytest.fixture(scope="module")
def forge() -> Iterator[RankForge]:
    with RankForge(("bridge_stand_ins:install", "bridge_ranks"), (Path(__file__).parent, *PATH)) as parent:
        yield parent


def mend_configuration(root: Path, iteration: int) -> None:
    """Does what docs/frameworks.md says: Bridge names an iteration before it writes its run_config.yaml."""
    there, before = (root / f"iter_{number:07d}" / "run_config.yaml" for number in (iteration, iteration - 2))
    lines = there.read_text().count("\n") if there.exists() else 0
    if lines < before.read_text().count("\n"):  # it was killed before it wrote that, or while it did
        shutil.copy(before, there)


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_resumes_exactly(forge: RankForge, tmp_path: Path, case: str) -> None:
    checkpoint, sizes, environment = CASES[case]
    reports = tmp_path / "reports.jsonl"

    def started(name: str, iterations: int) -> Any:
        return forge.start(
            "bridge_ranks:train",
            ranks=2,
            logs=tmp_path / f"{name}-{iterations}",
            arguments=[str(tmp_path / name), iterations, checkpoint, sizes],
            environment=environment | {"MEGATRON_DATASTATES_REPORT_FILE": str(reports)},
        )

    started("whole", 6).wait(60).succeeded()
    first = started("parts", 1000)
    tracker = tmp_path / "parts" / "latest_checkpointed_iteration.txt"
    first.wait_until(lambda: tracker.exists() and int(tracker.read_text() or 0) >= 4, 60)
    first.kill()
    begun = int(tracker.read_text())
    mend_configuration(tmp_path / "parts", begun)
    resumed = begun + 4
    log = started("parts", resumed).wait(60).succeeded().log
    assert f"at iteration {begun}" in log, "it resumed"
    started("whole", resumed).wait(60).succeeded()

    world = World(forge, tmp_path / "runs")
    for name in (f"iter_{begun:07d}", f"iter_{resumed:07d}"):
        for root in ("whole", "parts"):
            assert (tmp_path / root / name / "datastates.manifest").is_file(), (root, name)
            assert not list((tmp_path / root / name).glob("*.distcp"))
    last = f"iter_{resumed:07d}"
    (found,) = world.run(
        "bridge_ranks:differences", tmp_path / "whole" / last, tmp_path / "parts" / last, ranks=1
    )
    assert found["keys"] > 20
    assert found["different"] == []

    events = [json.loads(line) for line in reports.read_text().splitlines()]
    lazy = [event["lazy_bytes"] > 0 for event in events if event["event"] == "save"]
    assert lazy
    assert lazy == [environment != SWITCH] * len(lazy)


@pytest.mark.parametrize("how", ["enable", "switch"])
def test_nemo_rl_may_offload_and_rename_after_a_save(forge: RankForge, tmp_path: Path, how: str) -> None:
    (tmp_path / "runs").mkdir()
    for rank in World(forge, tmp_path / "runs").run("bridge_ranks:save_as_nemo_rl", tmp_path / "root", how):
        assert rank["different"] == []
        assert rank["compared"] > 20
        assert rank["lazy"] == [0, 0]
    for step in (1, 2):
        (iteration,) = (tmp_path / "root" / f"step_{step}" / "policy" / "weights").glob("iter_*")
        assert (iteration / "datastates.manifest").is_file()


def test_only_our_manager_enters_the_allow_list(forge: RankForge, tmp_path: Path) -> None:
    (found,) = World(forge, tmp_path / "runs").run("bridge_ranks:make_managers", tmp_path / "root", ranks=1)
    assert found["made"] == "CheckpointManager"
    assert found["allowed"] == {"ours": True, "another of ours": False}
    assert "is not in the allowlist" in found["foreign"]
    assert "'fsdp_dtensor' is not saved by" in found["fsdp"]
    assert "leave one of them out" in found["both"]
