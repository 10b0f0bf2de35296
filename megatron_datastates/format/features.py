"""Feature bits and format versions: what this release reads, and what it refuses.

Incompatible bits change what the bytes mean: a reader refuses those that it does not know. Compatible bits
only add something: a reader ignores those that it does not know.
"""

from __future__ import annotations

from megatron_datastates.errors import UnsupportedFormatError
from megatron_datastates.format.values import READABLE_VERSIONS

KNOWN_INCOMPATIBLE = 0
COMPATIBLE_CHECKSUMS = 1 << 0  # footers may have block checksums


def check_readable(what: str, format_version: int, incompatible: int) -> None:
    """Raises UnsupportedFormatError if `what` has an unknown format version or incompatible bits."""
    unknown = incompatible & ~KNOWN_INCOMPATIBLE
    if format_version in READABLE_VERSIONS and unknown == 0:
        return
    found = f"format {format_version}" + (f" with features {unknown:#x}" if unknown else "")
    raise UnsupportedFormatError(
        f"{what} has {found}; this release reads formats {' and '.join(map(str, READABLE_VERSIONS))}. "
        "It was written by a later release of megatron_datastates: update this installation."
    )
