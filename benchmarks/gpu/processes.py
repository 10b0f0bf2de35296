"""Runs a command, with everything that it starts, within a time limit. Needs only Python."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_LOOK_SECONDS = 5.0


def run_process(
    command: Sequence[str],
    seconds: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    look: Callable[[], None] = lambda: None,
) -> str:
    """Runs a command for at most `seconds`, then ends it and all that it started; returns how it ended.

    Its output goes to `log`. Calls `look` every few seconds meanwhile.
    """
    end = time.monotonic() + seconds
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        try:
            while (code := _exit_status(process, min(_LOOK_SECONDS, end - time.monotonic()))) is None:
                if time.monotonic() >= end:
                    return f"ended after its {seconds:.0f} s"
                look()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that it left, too
            process.wait()
    if code:
        last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return f"failed with {code}: {' | '.join(last[-3:])}"
    return "done"


def _exit_status(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Returns the exit status, or None if the process has not ended within `seconds`."""
    try:
        return process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return None
