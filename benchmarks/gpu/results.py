"""The results of benchmarks.gpu: what they must meet, the table that is printed, calls merged into one.

Works on plain dictionaries, as they stand in the JSON files. Measures nothing and imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import EIGHT, ONE

FINE = ("done", "left out: megatron")  # how the status of a part begins that is no failure


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One thing that must hold for a value in one part's results."""

    name: str
    part: str
    path: tuple[str, ...]
    holds: Callable[[float], bool]


def _of_copies() -> tuple[Requirement, ...]:
    cases = {"large": "large tensors", "many": "32 KiB", "small": "512 B to 8 KiB"}
    return tuple(
        Requirement(f"copies of {text} >= 95%", "copies", (case, "discard_to_bare"), _is_95_percent)
        for case, text in cases.items()
    )


def _of_held(suffix: str = "") -> tuple[Requirement, ...]:
    first = "first_save"
    ms = ("cases", "16 GiB", "held_ms")
    names: dict[str, tuple[tuple[str, ...], Callable[[float], bool]]] = {
        "trainer held <= 5 ms for 16 GiB": (ms, lambda ms: ms <= 5),
        "first save: only named device memory": ((first, "device_bytes_not_named"), _is_zero),
        "first save: no device memory of torch's": ((first, "device_bytes_by_torch"), _is_zero),
        "later saves: no device memory": (("device_bytes_of_later_saves",), _is_zero),
        "later saves: no device memory of torch's": (("device_bytes_by_torch",), _is_zero),
    }
    return tuple(Requirement(name + _NOTES[suffix], f"held{suffix}", *how) for name, how in names.items())


def _of_steps(suffix: str = "") -> tuple[Requirement, ...]:
    slowed = {
        "mean step": ("discard", "slowdown_of_the_mean_percent"),
        "step while copies run": ("discard", "slowdown_of_the_copying_step_percent"),
        "mean step while the disk writes": ("disk", "slowdown_of_the_mean_percent"),
    }
    return tuple(
        Requirement(f"{text} slowed by < 3%{_NOTES[suffix]}", f"steps{suffix}", path, lambda x: x < 3)
        for text, path in slowed.items()
    )


def _is_95_percent(ratio: float) -> bool:
    return ratio >= 0.95


def _is_zero(size: float) -> bool:
    return size == 0


_NOTES = {"": "", ONE: ", one connection", EIGHT: ", one, and eight for copies"}
REQUIREMENTS = (
    *_of_copies(),
    *_of_held(),
    *_of_steps(),
    Requirement("loads: no device memory of torch's", "loads", ("device_bytes_by_torch",), _is_zero),
    Requirement("loads to the device >= 85% of the disk", "loads", ("device_to_disk",), lambda x: x >= 0.85),
    *_of_held(ONE),
    *_of_steps(ONE),
    *_of_steps(EIGHT),
    Requirement(
        "saves in each iteration: end to end <= 2% longer",
        "training",
        ("ways", "datastates async in each iteration, tmpfs", "iteration_longer_percent"),
        lambda percent: percent <= 2,
    ),
)


def check_requirements(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns each requirement, its measured value, and whether it is met; None if it was not measured."""
    checked = []
    for requirement in REQUIREMENTS:
        value: Any = parts.get(requirement.part, {})
        for key in requirement.path:
            value = value.get(key) if isinstance(value, dict) else None
        met = None if value is None else bool(requirement.holds(value))
        checked.append({"bar": requirement.name, "measured": value, "met": met})
    return checked


def read_reports(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the results so far that a part's process has written, by part; ignores a truncated line."""
    results: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        results.setdefault(values.pop("part"), {}).update(values)
    return results


def merge(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the results of several calls; of a part that several have, the latest that was done counts.

    Raises:
        ValueError: they come from different GPUs, or from a GPU and from the fake driver.
    """
    found = sorted(found, key=lambda results: str(results["date"]))
    for name in ("of", "gpu"):
        if len(kinds := {str(results[name]) for results in found}) > 1:
            raise ValueError(
                f"results of one machine were expected, but these are of different machines: "
                f"{', '.join(sorted(kinds))}"
            )
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
        "commit": _one_or_all(results["commit"] for results in found),
        "native_module": _one_or_all(results["native_module"] for results in found),
        "bars": check_requirements(parts),
        "parts": parts,
    }


def _one_or_all(values: Iterable[Any]) -> Any:
    """Returns the value if all are equal, else a list of them."""
    every = list(dict.fromkeys(values))
    return every[0] if len(every) == 1 else every


def print_table(results: Mapping[str, Any], fake: bool) -> None:
    """Prints all numbers by part, then the requirements."""
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
    """Returns every dictionary in the results that has numbers itself, with its name."""
    found = [("  " + (name or "all"), nested)] if any(map(_short, nested.values())) else []
    for key, value in nested.items():
        if isinstance(value, dict):
            found += _tables(value, f"{name} {key}".strip())
    return found


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, int | float) else ""
