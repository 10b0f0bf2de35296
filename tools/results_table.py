"""Writes the README's table of results from the files in benchmarks/results.

    python tools/results_table.py            # rewrites the table in README.md
    python tools/results_table.py --check    # exits with 1 if it is not what the files say

What belongs here: which figures the README shows. What does not: measuring. Results that do not exist yet
have no rows; each row has a source, and each source names its machine, its date, and versions
that most others do not have.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- Made by tools/results_table.py; do not edit. -->"
END = "<!-- End of what it makes. -->"
OURS, THEIRS = "datastates", "torch_dist"
PEERS_PART = "disk, 1 rank"
# Later runs than those of training.json.
ONE_RANK, TWO_RANKS = "training-one-rank", "training-two-ranks"
TRAINING_PARTS = {ONE_RANK: ("large, DP 1", "one rank"), TWO_RANKS: ("large, DP 2", "two ranks")}
Results = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    source: str  # a file in benchmarks/results, without its suffix
    ours: str
    theirs: str = ""
    disk: str = ""
    is_detail: bool = False  # folded away


def engine(found: Results) -> Iterator[Row]:
    """Yields a row about writing by the native engine."""
    write = found["write"]
    rates = write["gb_per_s"]
    name = f"write {write['bytes'] >> 30} GiB with checksums"
    yield Row(name, "engine", rate(rates[OURS]), disk=disk_rate(write))


def load(found: Results) -> Iterator[Row]:
    """Yields rows about loading through Megatron."""
    loads = found["loads"]
    rates, peaks = loads["gb_per_s"], loads["peak_mib_beyond_targets"]
    for case, text in (
        ("plain", "load, 2 ranks"),
        ("the same on 2 ranks", "load, the same weights on 2 ranks"),
        ("TP 4 to 2", "load, tensor parallel 4 to 2"),
        ("optimizer buckets, DP 2 to 3", "load, optimizer state, data parallel 2 to 3"),
    ):
        disk = disk_rate(loads) if case == "plain" else ""
        ours, theirs = (rate(rates[f"{case}, {kind}"]) for kind in (OURS, THEIRS))
        yield Row(text, "load", ours, theirs, disk, is_detail=case not in ("plain", "TP 4 to 2"))
    growth = {
        kind: [f"{peak:.0f}" for peak in (min(values), max(values))]
        for kind in (OURS, THEIRS)
        for values in [[peak for name, peak in peaks.items() if name.endswith(kind)]]
    }
    ours, theirs = (" to ".join(dict.fromkeys(growth[kind])) for kind in (OURS, THEIRS))
    yield Row("host memory of a load, besides the loaded tensors", "load", f"{ours} MiB", f"{theirs} MiB")


def peers(found: Results) -> Iterator[Row]:
    """Yields rows about a save as a trainer sees it, beside the best that torch_dist does."""
    part = found["parts"].get(PEERS_PART)
    if part is None:
        return
    of = part["contenders"]
    what = f"of {part['bytes'] / (1 << 30):.2f} GiB in {part['tensors']:,} tensors"
    exact = [name for name, one in of.items() if one["exact"]]  # others are not ranked
    ways = [name for name in exact if name.startswith(THEIRS) and "async" in name]
    for text, value, ours, theirs in (
        (
            f"trainer held by a synchronous save {what}",
            "held_ms",
            OURS,
            [name for name in exact if name == THEIRS],
        ),
        ("trainer held by an asynchronous save of the same", "held_ms", f"{OURS} async", ways),
    ):
        if ours not in exact:
            continue
        best = min((of[name][value] for name in theirs), default=None)
        yield Row(text, "peers", f"{of[ours][value]:.0f} ms", "" if best is None else f"{best:.0f} ms")


def training(found: Results, result: str) -> Iterator[Row]:
    """Yields rows about runs in Megatron's loop that save in every iteration."""
    name, ranks = TRAINING_PARTS[result]
    cases = found["parts"].get(name, {}).get("cases", {})
    pair = [cases.get(f"{kind} async, every 1") for kind in (OURS, THEIRS)]
    if pair[0] is None:
        return
    size = max(one.get("checkpoint_bytes", 0) for one in cases.values()) / 1e6
    text = (
        f"Megatron's loop held by an asynchronous save of {size:,.0f} MB in every iteration, {ranks} "
        f"(`{THEIRS}`: forking)"
    )
    yield Row(text, result, *(f"{one['blocked_ms_per_save']:.0f} ms" if one else "" for one in pair))
    without = f"{cases['no checkpoints']['end_to_end_s']:.1f} s without saves"
    text = f"the same, {found['parts'][name]['iterations']} iterations end to end ({without})"
    yield Row(text, result, *(f"{one['end_to_end_s']:.1f} s" if one else "" for one in pair))
    rare = [cases.get(f"{kind} async, every 10") for kind in (OURS, THEIRS)]
    if rare[0] is not None:
        text = f"the run of {ranks} end to end, with a save every 10 iterations ({without})"
        took = (f"{one['end_to_end_s']:.1f} s" if one else "" for one in rare)
        yield Row(text, result, *took, is_detail=True)


def gpu(found: Results) -> Iterator[Row]:
    """Yields rows about a GPU: saves in Megatron's loop and beside its own ways, and what copies cost."""
    part = found["parts"]["training"]
    ours, theirs = (part["ways"][f"{name}, tmpfs"] for name in (f"{OURS} async", THEIRS))
    size = f"{ours['checkpoint_bytes'] / 1e6:,.0f} MB"
    held = f"{ours['held_ms']:,.0f} ms (median of {ours['saves']}, at most {ours['held_ms_most']:,.0f})"
    name = (
        f"Megatron's loop on a GPU held by an asynchronous save of {size} to tmpfs (`{THEIRS}`: synchronous)"
    )
    yield Row(name, GPU, held, f"{theirs['held_ms']:,.0f} ms ({_times(theirs['saves'])})")
    name = "an iteration of that loop, while such a save is copied"
    yield Row(name, GPU, _longer(ours, part["block"]))
    calls = found["parts"]["megatron"]
    ways = [way for name, way in calls["ways"].items() if name.startswith(f"{THEIRS}_async")]
    best = min(way["held_ms"] for way in ways)
    counted = (calls["repeats"] + 1) // 2  # `ways` has every other round: those that synchronize
    size = f"{calls['bytes'] / 1e6:,.0f} MB"
    name = f"trainer held by an asynchronous `dist_checkpointing.save` of {size} on a GPU, to disk"
    once = _times(counted)
    held = f"{calls['ways'][OURS]['held_ms']:,.0f} ms ({once})"
    yield Row(name, GPU, held, f"{best:,.0f} ms ({once})", is_detail=True)


def gpu_steps(found: Results) -> Iterator[Row]:
    """Yields a row about what copies cost a step on a GPU, with CUDA's own number of queues."""
    steps = found["parts"]["steps"]
    alone, beside = (steps[name]["copying_step_ms"] for name in ("alone", "disk"))
    copied = f"{steps['bytes'] / 1e6:,.0f} MB"
    name = f"a step of {alone:,.0f} ms on a GPU, while {copied} are copied and written to disk"
    yield Row(name, GPU_STEPS, f"{beside:,.0f} ms (median of {steps['repeats']})")


def _times(count: int) -> str:
    return "once" if count == 1 else f"median of {count}"


def _longer(way: Results, block: int) -> str:
    """Says by how much the iteration after a save is longer than those of the blocks beside it."""
    took, found = way["iterations_ms"], []
    for at in range(3 * block, len(took) - block, 2 * block):  # without the first save, in the second block
        beside = took[at - block : at] + took[at + block : at + 2 * block]
        found.append(100 * (took[at + 1] / statistics.median(beside) - 1))
    text = f"{statistics.median(found):.0f}% longer (median of {len(found)}, "
    return text + f"from {min(found):.0f} to {max(found):.0f}%)"


GPU = "gpu-h100-80gb-hbm3-2026-11-27-2"
GPU_STEPS = "gpu-h100-80gb-hbm3-2026-11-27-3"
MAKERS = {
    ONE_RANK: functools.partial(training, result=ONE_RANK),
    TWO_RANKS: functools.partial(training, result=TWO_RANKS),
    "peers": peers,
    GPU: gpu,
    GPU_STEPS: gpu_steps,
    "engine": engine,
    "load": load,
}


def rate(value: float) -> str:
    return f"{value:.2f} GB/s"


def disk_rate(part: Results) -> str:
    """Returns the rate of the disk's best configuration; says so if fio was not there."""
    best = part["best_of_the_disk"]
    return rate(part["gb_per_s"][best]) + (" (without fio)" if best.startswith("threads") else "")


def table(folder: Path) -> str:
    """Returns the table in Markdown; after it, folded away, further rows and the sources."""
    rows: list[Row] = []
    sources: dict[str, Results] = {}
    for name, make in MAKERS.items():
        path = folder / f"{name}.json"
        if path.exists():
            sources[name] = json.loads(path.read_text())
            rows += make(sources[name])
    used = dict.fromkeys(row.source for row in rows)
    usual = usual_versions([_machine(sources[name])["packages"] for name in used])
    return "\n".join(
        [
            *_lines([row for row in rows if not row.is_detail]),
            "",
            "<details><summary>More rows, and the sources: result files, machines, dates, versions</summary>",
            "",
            *_lines([row for row in rows if row.is_detail]),
            "",
            *(f"- {describe(name, sources[name], usual)}" for name in used),
            f"- versions where a file names no other: {_listed(usual)}",
            "",
            "</details>",
        ]
    )


def _lines(rows: list[Row]) -> list[str]:
    head = [f"| | {OURS} | `{THEIRS}` | the disk itself (fio) |", "|---|---|---|---|"]
    return [*head, *(f"| {row.name} | {row.ours} | {row.theirs} | {row.disk} |" for row in rows)]


def usual_versions(found: list[dict[str, str | None]]) -> dict[str, str]:
    """Returns the most frequent version of each package that all of these have."""
    packages = dict.fromkeys(name for versions in found for name in versions)
    everywhere = [name for name in packages if all(versions.get(name) for versions in found)]
    return {name: statistics.mode(str(versions[name]) for versions in found) for name in everywhere}


def describe(name: str, found: Results, usual: dict[str, str]) -> str:
    """Returns the machine and the date of a results' file, and the versions that are not the usual ones."""
    machine = _machine(found)
    parts = found.get("parts", {}).values()
    dates = sorted({part["date"] for part in parts if "date" in part} or {machine["date"]})
    device = f"{machine['gpu']['name']}, " if machine.get("gpu") else ""
    others = {package: v for package, v in machine["packages"].items() if v and v != usual.get(package)}
    return (
        f"[{name}.json](benchmarks/results/{name}.json): {device}{machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {' and '.join(dates)}{'; ' if others else ''}{_listed(others)}"
    )


def _machine(found: Results) -> Results:
    return found["machine"] if "machine" in found else found["parts"]["machine"]


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def replaced(page: str, content: str) -> str:
    """Returns the page with new content between the two marks; exits if they are not there."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"results_table.py: expected the lines {BEGIN!r} and {END!r} in the page; add them")
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if it would")
    parser.add_argument("--page", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    page = arguments.page.read_text()
    wanted = replaced(page, table(arguments.results))
    if not arguments.check:
        arguments.page.write_text(wanted)
    elif page != wanted:
        sys.exit(
            f"results_table.py: the table in {arguments.page} is not what {arguments.results} says; "
            "run tools/results_table.py"
        )


if __name__ == "__main__":
    main()
