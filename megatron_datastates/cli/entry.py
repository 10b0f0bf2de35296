"""The entry point of the console script. An interrupt at any moment is one line and exit code 130.

Where a reader of the output ends early, such as `head`, a command prints nothing and ends with exit code 141.

Importing this imports next to nothing, so that an interrupt while click is imported is caught, too. Commands
import what they need when they run: the package's heavy parts take seconds, help and completion do not wait.
Of a command line that begins with a sub-command, only that one's module is imported.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

INTERRUPTED = 130  # the shells' convention: 128 plus the number of SIGINT
NO_READER = 141  # likewise of SIGPIPE, which Python ignores
_NO_THREAD = "can't start new thread"  # says Python's RuntimeError
MODULES = {  # of the sub-commands
    "args": "args",
    "cat": "cat",
    "convert": "convert",
    "diff": "diff",
    "export": "export",
    "import": "hugging_face",
    "ls": "listing",
    "options": "options",
    "plan": "plan",
    "preflight": "preflight",
    "prune": "prune",
    "repair": "repair",
    "report": "report",
    "show": "show",
    "trend": "trend",
    "verify": "verify",
}


class _Interrupts:
    """Notes the first SIGINT and raises KeyboardInterrupt; ignores others, so that all is cleaned up."""

    def __init__(self) -> None:
        self.came = False
        self._before: Any = signal.signal(signal.SIGINT, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self.came:
            self.came = True
            raise KeyboardInterrupt

    def end(self) -> None:
        """Restores what a SIGINT did before."""
        signal.signal(signal.SIGINT, self._before)


def main() -> None:
    """Runs the command line. Raises SystemExit."""
    run(_load)


def _load() -> Callable[[], Any]:
    module = MODULES.get("".join(sys.argv[1:2]), "main")
    importlib.import_module(f"megatron_datastates.cli.{module}")
    from megatron_datastates.cli.program import run_program

    return run_program


def run(load: Callable[[], Callable[[], Any]]) -> None:
    """Calls what `load` returns. After an interrupt, prints one line and raises SystemExit with code 130.

    An OSError that no command has expected, such as a full disk for the output, is one line and code 2; so is
    a native module that is not built, and a lack of memory or threads. Any other error is a traceback and
    code 2, since 1 would say that a checkpoint is damaged. Where nobody reads the output any more, nothing is
    printed, and the code is 141.
    """
    _open_closed_streams()
    # Where SIGINT is ignored, as in the background of a shell's script, it stays so.
    interrupts = _Interrupts() if signal.getsignal(signal.SIGINT) is signal.default_int_handler else None
    try:
        try:
            load()()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where an error can be reported
    except BaseException as error:  # an interrupted import may raise anything
        if interrupts is None or not interrupts.came:
            if isinstance(error, OSError):
                _end_without_output(error)
            if isinstance(error, ImportError):
                _end_without_native_module(error)
            if isinstance(error, Exception):
                _end_unexpectedly(error)
            raise
        _complain("datastates: interrupted")
        sys.exit(INTERRUPTED)
    finally:
        if interrupts is not None:
            interrupts.end()


def _open_closed_streams() -> None:
    """Opens what a caller has closed (`>&-`): else the next file would have its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if number == 0 else "w"))


def _end_without_output(error: OSError) -> None:
    # What is still in the buffer would fail again, at the end of the interpreter.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    if isinstance(error, BrokenPipeError):
        os.dup2(nowhere, 2)
        sys.exit(NO_READER)
    place = "standard output" if error.filename is None else error.filename
    _complain(f"datastates: {place}: {error.strerror}")
    sys.exit(2)


def _end_without_native_module(error: ImportError) -> None:
    from megatron_datastates.errors import NativeModuleError

    if isinstance(error, NativeModuleError):
        _complain(f"datastates: {error}")
        sys.exit(2)


def _end_unexpectedly(error: Exception) -> None:
    from megatron_datastates.errors import is_lack_of_memory

    if is_lack_of_memory(error):
        _complain("datastates: there is not enough memory: raise its limit, or lower --memory if you pass it")
    elif isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        _complain(f"datastates: {error}: raise the limit of processes (ulimit -u, or the container's)")
    else:
        import traceback

        _complain(traceback.format_exc().rstrip("\n"))
    sys.exit(2)


def _complain(text: str) -> None:
    """Prints a line to standard error. If that fails, as on a full disk, only the exit code says what was."""
    try:
        print(text, file=sys.stderr)
    except OSError:  # what is still in the buffer would fail again, and the exit code would change
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
