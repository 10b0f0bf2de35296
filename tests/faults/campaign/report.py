"""Writes counts into docs/faults.md: `python -m tests.faults.campaign.report results.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[3] / "docs" / "faults.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"


def table(results: dict[str, Any]) -> str:
    """Returns a table with a row for each part, then each part's outcomes, folded."""
    lines = [f"Seed {results['seed']}.", "", "| part | rounds | minutes | violations |", "|---|---|---|---|"]
    for part in results["parts"]:
        minutes = part["seconds"] / 60
        lines.append(f"| {part['part']} | {part['rounds']} | {minutes:.1f} | {len(part['violations'])} |")
    for part in results["parts"]:
        count = "times, or KiB" if part["part"] == "soak" else "times"
        lines += ["", f"<details><summary>{part['part']}</summary>", ""]
        lines += [f"| {count} | what happened |", "|---|---|"]
        counts = sorted(part["outcomes"].items(), key=lambda item: (-item[1], item[0]))
        lines += [f"| {count} | {outcome} |" for outcome, count in counts]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def written(document: str, results: dict[str, Any]) -> str:
    """Returns the document with these figures in the place of those that it has."""
    head, _, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"{DOCUMENT} has no place for figures, between {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n{table(results)}\n{END}{tail}"


def as_json(results: dict[str, Any]) -> str:
    return json.dumps(results, indent=1, sort_keys=True) + "\n"


def write(results: dict[str, Any]) -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(), results))


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()))
