"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0  # after which something that must happen is taken not to happen


def eventually(condition: Callable[[], object], what: str = "what the test waits for") -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.002)
