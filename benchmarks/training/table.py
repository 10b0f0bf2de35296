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
    "interval sustained, s",
)
_TURNS_HEADINGS = (
    "model",
    "checkpoint, MB",
    "iteration without a save, ms",
    "blocked a save, ms",
    "iteration with a save: longer by, ms",
    "ratio",
    "quartiles of blocks",
    "blocks",
)
_RESTORE_HEADINGS = (
    "what is left",
    "load_checkpoint, s",
    "spread",
    "of it brought to --save, s",
    "read far, MB",
)


def markdown(part: str, results: Result) -> str:
    """Returns the table of one part."""
    found = results["parts"][part]
    if "restores" in found:
        return _restores(part, results)
    if "turns" in found:
        return _turns(part, results)
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
        one.get("sustained_s"),
    ]
    return [name, *("" if value is None else value for value in values)]


def _restores(part: str, results: Result) -> str:
    found = results["parts"][part]
    title = (
        f"### {part}: 2 nodes with a rank each, a checkpoint of {found['checkpoint_bytes'] / 1e6:.0f} MB, "
    )
    title += found["date"]
    how = (
        f"`load_checkpoint` of a job that resumes: median of {found['rounds']} rounds, the slower rank. Each "
        f"node writes to --save and reads there {found['far_bytes_per_second'] / 1e6:.0f} MB/s at most: "
        "writing by a limit on what is brought there, reading by a wait after each read of data files until "
        "they would have come at that rate. All directories are on one disk; the page cache has dropped them."
    )
    rows = [
        (
            name,
            one["load_s"],
            " to ".join(f"{s:.2f}" for s in one["spread_s"]),
            one["brought_s"],
            one["far_mb"],
        )
        for name, one in found["restores"].items()
    ]
    lines = [title, "", machine_line(results["machine"], found), "", how, ""]
    return "\n".join([*lines, *markdown_table(_RESTORE_HEADINGS, rows), ""])


def _turns(part: str, results: Result) -> str:
    found = results["parts"][part]
    how = (
        "`datastates async`, one rank, a save in every iteration. Blocks with saves and blocks without "
        "take turns in one process; each is compared with the two beside it. Training has one of two cores. "
        "Medians."
    )
    rows = [
        (
            f"{name}: {one['layers']} layers of {one['hidden']}, sequence {one['sequence']}",
            round(one["checkpoint_bytes"] / 1e6),
            one["iteration_ms"],
            one["blocked_ms"],
            one["cost_ms"],
            one["ratio"],
            " to ".join(f"{ratio:.3f}" for ratio in one["quartiles"]),
            one["blocks"],
        )
        for name, one in found["turns"].items()
    ]
    lines = [f"### {part}, {found['date']}", "", machine_line(results["machine"], found), "", how, ""]
    return "\n".join([*lines, *markdown_table(_TURNS_HEADINGS, rows), ""])
