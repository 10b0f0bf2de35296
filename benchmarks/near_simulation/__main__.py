"""The command line of the simulation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from benchmarks.command import PATH, Result, benchmark_command, markdown_table, write_results
from benchmarks.near_simulation.model import DAYS, GPUS, INTERRUPTIONS, STRATEGIES, Setting, simulate

_FAR_RATES = (1e9, 5e9, 20e9, 100e9, 500e9)
_QUICK_YEARS = 1.0


@benchmark_command
@click.option("--out", type=PATH, help="Write the results there, as JSON.")
@click.option("--picture", type=PATH, help="Draw them there.")
@click.option("--table", type=PATH, help="Write a table there, in Markdown.")
@click.option("--years", default=100.0, help="How long the cluster is to run.")
@click.option("--quick", is_flag=True, help="One year only.")
def main(out: Path | None, picture: Path | None, table: Path | None, years: float, quick: bool) -> None:
    """Simulates 1,024 nodes that fail: which tier restores, and what work is lost.

    \b
    Examples:
      python -m benchmarks.near_simulation --quick
      python -m benchmarks.near_simulation --out near-simulation.json --picture near-simulation.svg
    """
    results = _results(_QUICK_YEARS if quick else years)
    lines = _lines(results)
    print("\n".join(lines))
    write_results(results, out)
    if table is not None:
        table.write_text("\n".join(lines) + "\n")
    if picture is not None:
        from benchmarks.near_simulation.picture import draw

        draw(results, picture)


def _results(years: float) -> Result:
    setting = Setting()
    rates = []
    for rate in _FAR_RATES:
        one = dataclasses.replace(setting, far_bytes_per_second=rate)
        outcomes = {
            strategy.name: {
                name: round(value, 6)
                for name, value in dataclasses.asdict(simulate(strategy, one, years)).items()
            }
            for strategy in STRATEGIES
        }
        rates.append(
            {"far_gb_per_s": rate / 1e9, "far_seconds": round(one.far_seconds, 1), "strategies": outcomes}
        )
    return {
        "source": f"Llama 3 Herd of Models (2024), table 5: {INTERRUPTIONS} interruptions in {DAYS} days "
        f"on {GPUS:,} GPUs",
        "nodes": setting.nodes,
        "failures_a_day": round(setting.failures_a_day, 3),
        "shares": {kind: round(share, 4) for kind, share in setting.shares().items()},
        "setting": {
            name: value
            for name, value in dataclasses.asdict(setting).items()
            if name != "far_bytes_per_second"
        },
        "years": years,
        "rates": rates,
    }


def _lines(results: Result) -> list[str]:
    setting, shares = results["setting"], results["shares"]
    lost = ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items())
    headings = [
        *("shared storage takes", "checkpoints in", "resumed from near tiers", "with copies"),
        *("from shared storage", "work lost, min a day", "waited at restores, min a day"),
    ]
    rows = [
        (
            f"{rate['far_gb_per_s']:g} GB/s ({rate['far_seconds'] / 60:.1f} min a checkpoint)",
            name,
            f"{one['near']:.1%}",
            f"{one['copies']:.1%}",
            f"{one['far']:.2%}",
            f"{one['lost_minutes_a_day']:.1f}",
            f"{one['waited_minutes_a_day']:.1f}",
        )
        for rate in results["rates"]
        for name, one in rate["strategies"].items()
    ]
    title = f"{results['nodes']:,} nodes of 8 GPUs, {results['failures_a_day']:.2f} failures a day"
    return [
        f"### Simulation: {title}",
        "",
        f"Failures as in {results['source']}. Lost with a failure: {lost} (the last one is assumed). "
        f"Checkpoints of {setting['checkpoint_bytes'] / 1e12:.2f} TB: to shared storage one after the other, "
        f"as fast as it takes them; with a near tier one each {setting['near_interval']:g} s, at "
        f"{setting['near_bytes_per_second'] / 1e9:g} GB/s a node, and copies at "
        f"{setting['network_bytes_per_second'] / 1e9:g} GB/s a node. {results['years']:g} years.",
        "",
        *markdown_table(headings, rows),
    ]


if __name__ == "__main__":
    main()
