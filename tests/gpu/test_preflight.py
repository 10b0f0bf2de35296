"""datastates preflight where there is a GPU: the state is on it."""

from __future__ import annotations

from pathlib import Path

from megatron_datastates.preflight import run
from megatron_datastates.preflight.ranks import Ranks


def test_saves_of_device_memory_load_again(tmp_path: Path) -> None:
    ranks = Ranks()
    assert ranks.device.type == "cuda"
    result = run.preflight(ranks, tmp_path / "run", 256 << 20, saves=3)
    assert result.is_good, result.checks
    assert result.trial is not None and result.trial.bytes == 256 << 20
