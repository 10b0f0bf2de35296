"""Forged files whose checksums are all right: what they claim is refused, or is exactly what is loaded.

No code of theirs runs, no file outside of the checkpoint is opened, memory stays within a bound, and every
error is one of ours.
"""

from __future__ import annotations

from tests.faults.campaign.isolated import play_all
from tests.faults.campaign.tally import Campaign, Tally

ROUNDS = 1200


def run(campaign: Campaign) -> Tally:
    tally = Tally("forged")
    play_all(campaign, tally, ROUNDS, "tests.faults.campaign.forged_rounds", {})
    return tally
