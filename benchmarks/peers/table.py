"""Tables of the results of benchmarks.peers, in Markdown."""

from __future__ import annotations

from benchmarks.command import Result, machine_line, markdown_table
from megatron_datastates.config import GIB

_HEADINGS = (
    "",
    "held, ms",
    "spread",
    "durable, s",
    "GB/s",
    "load cold, s",
    "load warm, s",
    "files",
    "memory, MiB",
    "first save: held, ms",
    "exact",
)


def markdown(part: str, results: Result) -> str:
    """Returns the tables of one part: figures, ratios, and each contender's settings."""
    found = results["parts"][part]
    size = f"{found['bytes'] / GIB:.2f} GiB in {found['tensors']:,} tensors"
    lines = [f"### {part}: {size}, {found['date']}", "", _machine(results, found), ""]
    lines += markdown_table(_HEADINGS, [_row(name, one) for name, one in found["contenders"].items()])
    rates = [f"{verb}s {one['gb_per_s']} GB/s ({one['by']})" for verb, one in found["disk"].items()]
    lines += ["", f"The disk itself {' and '.join(rates)}.", ""]
    ratios = found["ratios"].items()
    lines += markdown_table(
        ("times ours", "held", "durable", "load cold"), [[name, *one.values()] for name, one in ratios]
    )
    lines += ["", "Settings, and who makes the files durable:", ""]
    lines += [f"- {name}: {one['settings']}; {one['syncs']}" for name, one in found["contenders"].items()]
    lines += [f"- {name}: left out: {why}" for name, why in found["left_out"].items()]
    return "\n".join([*lines, ""])


def _machine(results: Result, found: Result) -> str:
    caches = "" if found["caches_dropped"] else " Caches could not be dropped: cold loads were warm."
    return machine_line(results["machine"], found) + caches


def _row(name: str, one: Result) -> list[object]:
    low, high = one["spread_held_ms"]
    return [
        name,
        f"{one['held_ms']:.1f}",
        f"{low:.1f} to {high:.1f}",
        one["durable_s"],
        one["write_gb_per_s"],
        one["load_s"]["cold"],
        one["load_s"]["warm"],
        one["files"],
        one["first"]["memory_growth_mib"],
        one["first"]["held_ms"],
        "yes" if one["exact"] and one["first"]["exact"] else f"NO: {one.get('differs', 'the first')}",
    ]
