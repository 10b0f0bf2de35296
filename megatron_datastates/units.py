"""Numbers of bytes and seconds, as messages and reports have them."""

from __future__ import annotations


def size_text(count: float) -> str:
    """Formats a number of bytes in three digits: `1.50 GB`. Units are powers of 1000, as in `2GB/s`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        size = count / scale
        if size >= 0.9995:  # 999,960 B are 1.00 MB, not 1000 kB
            return f"{size:,.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"
    return f"{count:.0f} B"


def milliseconds(seconds: float) -> float:
    """Returns seconds as milliseconds, rounded to microseconds."""
    return round(seconds * 1000, 3)
