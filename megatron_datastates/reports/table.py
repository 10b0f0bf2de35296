"""One row for each save, as text: the columns of the terminal's table and of the page's."""

from __future__ import annotations

from megatron_datastates.reports.advice import milliseconds
from megatron_datastates.reports.reading import Save
from megatron_datastates.units import size_text

COLUMNS = (
    "iteration",
    "state",
    "mode",
    "held",
    "fence",
    "copied",
    "serialized",
    "written",
    "durable",
    "published",
    "size",
    "MB/s",
    "before",
    "slowest",
)
# Those that fit into 80 columns.
SHORT = ("iteration", "state", "mode", "held", "fence", "copied", "written", "published", "MB/s")
LEGEND = (
    "held: time taken from the trainer; fence: the part of it in which the optimizer waited; copied, "
    "written, published: how long after the start of the save, copied and written on the slowest rank "
    "(if known)"
)
LEGEND_OF_REST = (
    "serialized, durable: how long after the start, too, durable on the slowest rank, with the wait for the "
    "next optimizer step; before: saves that were unfinished when it began; slowest: the rank that wrote "
    "longest."
)


def row(save: Save) -> list[str]:
    """Returns the cells of a save, in the order of COLUMNS."""
    is_measured = save.mode != "dcp"  # of DCP's saves, nothing is known about what held the trainer
    return [
        save.name,
        save.state,
        save.mode,
        milliseconds(save.held_ms) if is_measured else "-",
        milliseconds(save.fence_ms) if is_measured else "-",
        milliseconds(save.slowest_ms("staging")),
        milliseconds(save.serializing_ms),
        milliseconds(save.slowest_ms("writing")),
        milliseconds(save.slowest_ms("durable")),
        "-" if save.published_ms is None else milliseconds(save.published_ms),
        size_text(save.bytes),
        f"{save.write_mb_per_s:,.0f}",
        str(save.saves_before),
        f"rank {save.spreads['writing'].slowest_rank}" if "writing" in save.spreads else "-",
    ]
