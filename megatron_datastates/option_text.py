"""How values of options are written: sizes, words, numbers and names as text.

Belongs here: parsers, all of which raise ValueError with what they expected. Does not belong here: which
option has which parser, its default, and what only one option allows (config.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

from megatron_datastates.files import is_object, path_of

ON_OR_OFF = dict.fromkeys(["on", "1", "true", "yes"], True) | dict.fromkeys(
    ["off", "0", "false", "no"], False
)
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_MOST_BYTES = 1 << 63


def parse_bytes(text: str) -> int:
    """Reads a size such as `2GiB`, `500MB` or `4096` (bytes); returns bytes.

    Raises:
        ValueError: the text is not a size, or the size is 8 EiB or more, or part of a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].lower()) if match else None
    size = Decimal(match[1]) * unit if match and unit is not None else None
    if size is None or size >= _MOST_BYTES or 0 < size < 1:  # 0 stands for no limit
        raise ValueError("expected a size such as 2GiB, 500MB or 4096, below 8EiB")
    return int(size)


def parse_on_off(text: str) -> bool:
    """Reads a switch, which is written in one of several ways."""
    if text.lower() not in ON_OR_OFF:
        raise ValueError("expected on or off")
    return ON_OR_OFF[text.lower()]


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        if re.fullmatch(r"\d{1,9}", text, re.ASCII) is None or not least <= int(text) <= most:
            raise ValueError(f"expected a whole number from {least} to {most}")
        return int(text)

    return parse


def one_of(*words: str) -> Callable[[str], str]:
    """Returns a parser of these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}")
        return text

    return parse


def parse_seconds(text: str) -> float:
    """Reads a time that is not 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise ValueError("expected a number of seconds above 0 and below 1e9")
    return value


def parse_local_directory(text: str) -> str:
    """Reads a directory that is not in an object store."""
    if text and is_object(path_of(text)):
        raise ValueError("expected a directory of a file system")
    return text


def parse_file(text: str) -> str:
    """Reads the path of a file. A relative one is of the working directory of now: it may change."""
    try:
        return str(Path(text).absolute()) if text else ""
    except OSError:  # the working directory was removed
        return text


def parse_functions(text: str) -> str:
    """Reads names of functions, separated by commas; returns the text."""
    for name in named_functions(text):
        if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", name) is None:
            raise ValueError(f"expected package.module:function, found {name!r}; separate several by commas")
    return text


def named_functions(text: str) -> list[str]:
    """Returns the names in a list that is separated by commas."""
    return [name.strip() for name in text.split(",")] if text else []
