"""Tables of the results of benchmarks.training, in Markdown."""

from __future__ import annotations

from benchmarks.command import Result, machine_line, markdown_table

_HEADINGS = (
    "",
    "iteration, ms",
    "with a checkpoint",
    "without",
    "blocked a save, ms",
    "lost a save, ms",
    "end to end, s",
    "spread",
    "goodput",
    "papers' throughput, GB/s",
    "first save, ms",
    "drained after the end, s",
)


def markdown(part: str, results: Result) -> str:
    """Returns the table of one part."""
    found = results["parts"][part]
    size = next((one["checkpoint_bytes"] for one in found["cases"].values() if "saves" in one), 0)
    title = f"### {part}: {found['layers']} layers of {found['hidden']}, data parallel "
    title += f"{found['data_parallel']}, checkpoints of {size / 1e6:.0f} MB, {found['date']}"
    rows = [_row(name, one) for name, one in found["cases"].items()]
    lines = [title, "", machine_line(results["machine"], found), ""]
    return "\n".join([*lines, *markdown_table(_HEADINGS, rows), ""])


def _row(name: str, one: Result) -> list[object]:
    low, high = one["spread_end_to_end_s"]
    values = [
        one.get("mean_iteration_ms", one["iteration_ms"]),
        one.get("iteration_with_checkpoint_ms"),
        one.get("iteration_without_checkpoint_ms"),
        one.get("blocked_ms_per_save"),
        one.get("lost_ms_per_save"),
        one["end_to_end_s"],
        f"{low:.2f} to {high:.2f}",
        one["goodput"],
        one.get("throughput_gb_per_s"),
        one.get("first_save_ms"),
        one.get("drained_after_s"),
    ]
    return [name, *("" if value is None else value for value in values)]
