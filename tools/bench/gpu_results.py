"""What gpu.py found: the bars that it is judged by, the table that is printed, calls merged into one.

Works on plain dictionaries, as they stand in the JSON files; measures nothing and imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ONE = "_one_connection"  # ends the name of a part that runs with CUDA_DEVICE_MAX_CONNECTIONS=1
FINE = ("done", "left out: megatron")


@dataclasses.dataclass(frozen=True)
class Bar:
    """One thing that must hold, of a value in one part's results."""

    name: str
    part: str
    path: tuple[str, ...]
    holds: Callable[[float], bool]


def _bars_of(suffix: str) -> tuple[Bar, ...]:
    """Those of the parts that run with one connection and with as many as CUDA makes."""
    copies, held, steps = (part + suffix for part in ("copies", "held", "steps"))
    first, later = ("first_save",), "device_bytes_of_later_saves"
    cases = {"large": "large tensors", "many": "32 KiB", "small": "512 B to 8 KiB"}
    slowed = {
        "mean step": ("discard", "slowdown_of_the_mean_percent"),
        "step while copies run": ("discard", "slowdown_of_the_copying_step_percent"),
        "mean step while the disk writes": ("disk", "slowdown_of_the_mean_percent"),
    }
    bars = (
        *(
            Bar(f"copies of {of} >= 95%", copies, (case, "discard_to_bare"), _most)
            for case, of in cases.items()
        ),
        Bar("trainer held <= 5 ms for 16 GiB", held, ("cases", "16 GiB", "held_ms"), _brief),
        Bar("first save: only named device memory", held, (*first, "device_bytes_not_named"), _none),
        Bar("first save: no device memory of torch's", held, (*first, "device_bytes_by_torch"), _none),
        Bar("later saves: no device memory", held, (later,), _none),
        Bar("later saves: no device memory of torch's", held, ("device_bytes_by_torch",), _none),
        *(Bar(f"{of} slowed by < 3%", steps, path, _little) for of, path in slowed.items()),
    )
    note = ", one connection" if suffix else ""
    return tuple(dataclasses.replace(bar, name=bar.name + note) for bar in bars)


def _most(ratio: float) -> bool:
    return ratio >= 0.95


def _brief(milliseconds: float) -> bool:
    return milliseconds <= 5


def _none(size: float) -> bool:
    return size == 0


def _little(percent: float) -> bool:
    return percent < 3


BARS = (
    *_bars_of(""),
    Bar("loads: no device memory of torch's", "loads", ("device_bytes_by_torch",), _none),
    Bar("loads to the device >= 85% of the disk", "loads", ("device_to_disk",), lambda x: x >= 0.85),
    *_bars_of(ONE),
)


def check_bars(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each bar with its measured value and whether it is met; None where it was not measured."""
    checked = []
    for bar in BARS:
        value: Any = parts.get(bar.part, {})
        for key in bar.path:
            value = value.get(key) if isinstance(value, dict) else None
        met = None if value is None else bool(bar.holds(value))
        checked.append({"bar": bar.name, "measured": value, "met": met})
    return checked


def read_told(path: Path) -> dict[str, dict[str, Any]]:
    """Results by part; a line that was cut off is none."""
    results: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        results.setdefault(values.pop("part"), {}).update(values)
    return results


def merge(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several calls' results as one; of a part that is in more than one, the latest that was done.

    Raises:
        ValueError: they are of different GPUs, or of a try and of a GPU.
    """
    found = sorted(found, key=lambda results: str(results["date"]))
    for name in ("of", "gpu"):
        if len(kinds := {str(results[name]) for results in found}) > 1:
            raise ValueError(f"these results are of different machines: {', '.join(sorted(kinds))}")
    parts: dict[str, Any] = {}
    for results in found:
        for name, part in results["parts"].items():
            earlier = parts.get(name, {"status": ""})["status"]
            if part["status"].startswith(FINE) or not earlier.startswith(FINE):
                parts[name] = part
    return {
        "of": found[-1]["of"],
        "gpu": found[-1]["gpu"],
        "date": found[-1]["date"],
        "commit": _alike(results["commit"] for results in found),
        "native_module": _alike(results["native_module"] for results in found),
        "bars": check_bars(parts),
        "parts": parts,
    }


def _alike(values: Iterable[Any]) -> Any:
    """The one value, or all of them."""
    every = list(dict.fromkeys(values))
    return every[0] if len(every) == 1 else every


def print_table(results: Mapping[str, Any], fake: bool) -> None:
    """All numbers by part; then the bars."""
    for part, found in results["parts"].items():
        print(f"{part}: {found['status']}")
        for name, values in _tables(found):
            shown = [f"{key} {_short(value)}" for key, value in values.items() if _short(value)]
            print(*textwrap.wrap(f"{name}: {', '.join(shown)}", 110, subsequent_indent="    "), sep="\n")
        left_out = found.get("left_out") or []
        for line in (
            (f"{name}: {why}" for name, why in left_out.items()) if isinstance(left_out, dict) else left_out
        ):
            print(f"  left out: {line}")
    print(f"native module: {results['native_module']}\n")
    for row in results["bars"]:
        met = {True: "met", False: "NOT MET", None: "not measured"}[row["met"]]
        print(f"{row['bar']:<62} {_short(row['measured']) or '-':>12}   {'means nothing' if fake else met}")


def _tables(nested: Mapping[str, Any], name: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """Every dictionary in the results that holds numbers itself."""
    found = [("  " + (name or "all"), nested)] if any(map(_short, nested.values())) else []
    for key, value in nested.items():
        if isinstance(value, dict):
            found += _tables(value, f"{name} {key}".strip())
    return found


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, int | float) else ""
