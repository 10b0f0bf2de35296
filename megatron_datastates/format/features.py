"""Feature bits and format versions: what may be read, what must be refused.

Incompatible bits change what the bytes mean: a reader that does not know one must refuse. Compatible
bits only add: unknown ones are ignored.
"""

from __future__ import annotations

from megatron_datastates.errors import UnsupportedFormatError
from megatron_datastates.format.values import FORMAT_VERSION

KNOWN_INCOMPATIBLE = 0
COMPATIBLE_CHECKSUMS = 1 << 0  # block checksums are there


def check_readable(what: str, format_version: int, incompatible: int) -> None:
    """Raises UnsupportedFormatError if this release cannot know what the bytes of `what` mean."""
    unknown = incompatible & ~KNOWN_INCOMPATIBLE
    if format_version == FORMAT_VERSION and unknown == 0:
        return
    found = f"format {format_version}" + (f" with features {unknown:#x}" if unknown else "")
    raise UnsupportedFormatError(
        f"{what} has {found}; this release reads format {FORMAT_VERSION}. "
        "It was written by a later release of megatron_datastates: update it here."
    )
