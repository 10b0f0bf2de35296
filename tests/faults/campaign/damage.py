"""Single damages of every kind, one a round: a load yields exactly the right bytes, or names what is damaged.

The oracle is `patterns`. A round whose load is refused also asks whether `verify` finds the fault; each asks
what the commands do.
"""

from __future__ import annotations

from tests.faults.campaign import specimens
from tests.faults.campaign.isolated import play_all
from tests.faults.campaign.tally import Campaign, Tally

ROUNDS = 6000


def run(campaign: Campaign) -> Tally:
    tally = Tally("damage")
    root = campaign.folder / "damage" / "sound"
    specimens.make(campaign.forge, root)
    play_all(campaign, tally, ROUNDS, "tests.faults.campaign.damage_rounds", {"root": str(root)})
    return tally
