"""What the campaign prints and writes at its end: the table of docs/faults.md, and all counts as JSON."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.faults.campaign.tally import Tally

HEAD = "| part | rounds | violations | seed | commit | date |\n|---|---|---|---|---|---|\n"


def commit() -> str:
    """Returns what is checked out: a commit, with "-dirty" if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def table(tallies: Sequence[Tally], seed: int, commit: str) -> str:
    """Returns a table with a row for each part, as docs/faults.md shows it."""
    today = datetime.date.today()
    rows = (
        f"| {each.part} | {each.rounds} | {len(each.violations)} | {seed} | {commit} | {today} |\n"
        for each in tallies
    )
    return HEAD + "".join(rows)


def as_json(tallies: Sequence[Tally], seed: int, commit: str) -> str:
    found = {"seed": seed, "commit": commit, "parts": [vars(each) for each in tallies]}
    return json.dumps(found, indent=1, sort_keys=True) + "\n"
