"""Which files this process has open, for tests of what is closed in time."""

from __future__ import annotations

import contextlib
from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """Returns the files below `folder` that this process has open, one for each descriptor."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone
            found.append(str(link.readlink()))
    return [name for name in found if name.startswith(str(folder))]
