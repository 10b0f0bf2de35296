"""A slice of the fault campaign: no violation, and the rounds really happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.campaign import report
from tests.faults.campaign.__main__ import PARTS, ROOT, part_named
from tests.faults.campaign.tally import Campaign, Tally
from tests.support.ranks import RankForge
from tests.support.world import PATH, PRELOAD

SEED = 20261122
# Part -> rounds of the slice, and outcomes of which each has to be counted: what a round of nothing lacks.
SLICES: dict[str, tuple[int, tuple[str, ...]]] = {
    "kills": (5, ()),
    "storage": (3, ()),
    "two_runs": (2, ()),
    "damage": (90, ("refused by our reader", "refused by Megatron's load", "loaded exactly by our reader")),
    "forged": (54, ("done: tensor", "refused: tensor", "refused: object", "done: open torch_dist")),
    "readers": (1, ("load_by_reader: exactly one iteration, of the directory saved again",)),
}


def test_every_part_has_a_slice() -> None:
    assert SLICES.keys() == set(PARTS) - {"soak", "jobs"}  # which take minutes, or show nothing


def test_the_page_shows_the_table_that_the_campaign_prints() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    printed = report.table([Tally(part, rounds=3) for part in PARTS], 7, "0123abcd")
    shown = page[page.index(report.HEAD) :].partition("\n\n")[0].splitlines()
    cells = [[line.split("|")[1] for line in lines] for lines in (shown, printed.splitlines())]
    assert cells[0] == cells[1]
    assert "| kills | 3 | 0 | 7 | 0123abcd | " in printed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", SLICES)
def test_a_slice_of_the_campaign_finds_no_violation(part: str, tmp_path: Path) -> None:
    rounds, outcomes = SLICES[part]
    forge = RankForge((*PRELOAD, "tests.faults.campaign.job"), (*PATH, ROOT))
    with forge:
        tally: Tally = part_named(part)(Campaign(SEED, tmp_path, forge, rounds))
    assert tally.violations == []
    assert tally.rounds == rounds and sum(tally.outcomes.values()) >= rounds
    missing = [outcome for outcome in outcomes if not tally.outcomes[outcome]]
    assert missing == [], dict(tally.outcomes)
