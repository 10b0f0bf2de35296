"""Runs the campaign: `python -m tests.faults.campaign --seed 1`.

Exits with 1 if anything was violated. A violation's text names its part and round:
`--parts PART --only ROUND` with the same seed repeats it. Prints the table of docs/faults.md at its end.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

from tests.faults.campaign import report
from tests.faults.campaign.tally import Campaign, Part, Tally
from tests.support.ranks import RankForge
from tests.support.world import PATH, PRELOAD

ROOT = Path(__file__).parents[3]  # of the repository: ranks import this package, too
# Each is a module of this package with a function `run(campaign) -> Tally`.
PARTS: tuple[str, ...] = ("kills", "storage", "two_runs", "damage", "forged", "readers", "soak", "jobs")


def part_named(name: str) -> Part:
    part: Part = importlib.import_module(f"tests.faults.campaign.{name}").run
    return part


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, help="of each part, in place of its own number")
    parser.add_argument("--only", type=int, metavar="ROUND", help="this round alone")
    parser.add_argument("--minutes", type=float, help="a part begins no more rounds after so many")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the counts as JSON")
    return parser.parse_args(arguments)


def show(tally: Tally) -> None:
    print(f"{tally.part}: {tally.rounds} rounds in {tally.seconds:.0f} s, {len(tally.violations)} violations")
    for outcome, count in sorted(tally.outcomes.items()):
        print(f"    {count:6}  {outcome}")
    for violation in tally.violations:
        print(f"    VIOLATED  {violation}", flush=True)


def run(options: argparse.Namespace, folder: Path) -> list[Tally]:
    with RankForge((*PRELOAD, "tests.faults.campaign.job"), (*PATH, ROOT)) as forge:
        campaign = Campaign(options.seed, folder, forge, options.rounds, options.only, options.minutes)
        tallies = []
        for name in options.parts:
            tallies.append(part_named(name)(campaign))
            show(tallies[-1])
    return tallies


def main() -> None:
    options = parse()
    commit = report.commit()  # files may change during hours
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="campaign-") as folder:
        tallies = run(options, Path(folder))
    if options.out:
        options.out.write_text(report.as_json(tallies, options.seed, commit))
    print(f"\n{report.table(tallies, options.seed, commit)}", end="")
    sys.exit(any(each.violations for each in tallies))


if __name__ == "__main__":
    main()
