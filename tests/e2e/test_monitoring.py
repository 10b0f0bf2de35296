"""A run whose script stays is watched: reports on every rank, scalars for TensorBoard on the last one."""

import json
from pathlib import Path
from typing import Any

from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_rank_reports_published_and_failed_saves_and_loads(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    how = [*LAYOUTS["tp2"], "--ckpt-format", "datastates", "--datastates-providers", "monitoring:watch"]
    how += ["--save", str(checkpoints.root), "--load", str(checkpoints.root), "--save-interval", "2"]
    how += ["--async-save", "--datastates-on-failure", "warn", "--train-iters", "8"]
    seen = tmp_path / "seen"
    seen.mkdir()
    environment = {"MONITORED": str(seen), "TINY_FAULTS_OF_RANK_1": "sync:2:EIO"}
    pretraining.run(*how, "--exit-interval", "6", environment=environment)
    assert checkpoints.published() == [2, 6]

    pretraining.run(*how, environment={"MONITORED": str(seen)})

    for rank in range(2):
        reports = lines(seen / f"rank{rank}.jsonl")
        facts = [(one["event"], one["state"], one["iteration"]) for one in reports]
        saves = [("save", "published", 2), ("save", "failed", 4), ("save", "published", 6)]
        assert facts == [*saves, ("load", "loaded", 6), ("save", "published", 8)]
        assert [one["rank"] for one in reports] == [rank] * 5
        assert reports[3]["ranks_ms"]["reading"]["slowest_rank"] in (0, 1)
    scalars = {(name, step): value for name, value, step in lines(seen / "scalars.jsonl")}
    failed = {step: value for (name, step), value in scalars.items() if name == "datastates/failed_saves"}
    assert failed == {2: 0, 4: 1, 6: 1, 8: 0}, "of each process"
    first = lines(seen / "rank1.jsonl")[0]
    assert scalars["datastates/held_ms", 2] == first["held_ms"]
    assert scalars["datastates/max_durable_ms", 2] == first["ranks_ms"]["durable"]["max"]
    assert ("datastates/held_ms", 4) not in scalars
