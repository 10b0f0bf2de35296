"""Slices written as for numpy and torch: `0:2,:,5`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from megatron_datastates.errors import MismatchError


@dataclasses.dataclass(frozen=True)
class Slice:
    """A box of a tensor, and the shape that is left when axes with a single index are dropped."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    kept_shape: tuple[int, ...]


def parse_slice(text: str, global_shape: Sequence[int]) -> Slice:
    """Parses a slice. Omitted axes are whole, negative numbers count from the end, steps are not supported.

    Raises:
        MismatchError: `text` is not a slice, or exceeds a tensor of this shape.
    """
    entries = [entry.strip() for entry in text.strip().removeprefix("[").removesuffix("]").split(",")]
    if entries == [""]:
        entries = []
    if entries.count("...") == 1:
        at = entries.index("...")
        entries[at : at + 1] = [":"] * (len(global_shape) - len(entries) + 1)
    if len(entries) > len(global_shape):
        raise MismatchError(
            f"slice {text!r} has {len(entries)} axes, but the tensor has {len(global_shape)} (its shape is "
            f"{list(global_shape)}): remove some"
        )
    entries += [":"] * (len(global_shape) - len(entries))
    axes = [_axis(entry, size, text) for entry, size in zip(entries, global_shape, strict=True)]
    kept = (stop - start for (start, stop), entry in zip(axes, entries, strict=True) if ":" in entry)
    return Slice(tuple(a for a, _ in axes), tuple(b - a for a, b in axes), tuple(kept))


def _axis(entry: str, size: int, text: str) -> tuple[int, int]:
    match = re.fullmatch(
        r"(?P<at>-?\d{1,18})|(?P<start>-?\d{,18})\s*:\s*(?P<stop>-?\d{,18})", entry, re.ASCII
    )
    if match is None or "-" in (match["start"], match["stop"]):
        raise MismatchError(
            f"{text!r} is not a slice: expected one such as 0:2,:,5 (steps are not supported)"
        )
    if match["at"] is not None:
        start = _from_end(int(match["at"]), size)
        stop = start + 1
    else:
        start = _from_end(int(match["start"] or 0), size)
        stop = _from_end(int(match["stop"]), size) if match["stop"] else size
    if not 0 <= start <= stop <= size:
        raise MismatchError(f"slice {text!r}: {entry!r} is out of range for an axis of {size} elements")
    return start, stop


def _from_end(number: int, size: int) -> int:
    return number + size if number < 0 else number
