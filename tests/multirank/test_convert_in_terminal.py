"""datastates convert on two ranks of torchrun, in a terminal, as a person sees it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.terminal import COLUMNS, lines_of, written_to_terminal
from tests.unit.converting import save_with_dcp

TENSOR_BYTES = 40_000_000
TOOL = Path(__file__).parents[2] / "tools" / "convert.py"
SHOWN = re.compile(r"([\d.]+)/([\d.]+) MB")


@pytest.mark.long
def test_one_bar_counts_the_work_of_all_ranks(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(TENSOR_BYTES // 4) for name in "ab"}
    save_with_dcp(tmp_path / "source", tensors)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(TOOL),
    ]
    words = ["source", "target", "--ranks", "2", "--memory", "66MiB", "--verify"]
    slowly = {"MEGATRON_DATASTATES_WRITE_LIMIT": "20MB", "OMP_NUM_THREADS": "1"}
    code, written = written_to_terminal([*launch, *words], tmp_path, **slowly)
    lines = lines_of(written)
    assert code == 0, lines
    converting = written[written.index("converting") : written.rindex("converting")]
    counts = [(float(done), float(total)) for done, total in SHOWN.findall(converting)]
    assert {total for _, total in counts} == {2 * TENSOR_BYTES / 1e6}, "of both ranks"
    assert max(done for done, _ in counts) > 1.2 * TENSOR_BYTES / 1e6, "more than one rank writes"
    assert "verifying" in written
    said = [line for line in lines if line]
    assert sum("2 tensors and 0 objects in 2 files" in line for line in said) == 1, said
    assert all(len(line) <= COLUMNS for line in said), said
    assert not any("converting" in line or "verifying" in line for line in said), "bars are gone"
