"""Commands in a terminal, as a person sees them. Also used by tools/pictures.py."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from tests.support.programs import Programs

COLUMNS = 80
_ROOT = Path(__file__).parents[2]


def in_terminal(words: str, directory: Path, programs: Programs | None = None) -> tuple[int, list[str]]:
    """Runs `datastates WORDS` in a terminal of 80 columns and 24 lines.

    Returns its exit code, and all lines that it writes, without progress bars, which are erased.
    """
    command = ["-m", "megatron_datastates", *shlex.split(words)]
    code, text = written_to_terminal([sys.executable, *command], directory, programs)
    return code, lines_of(text)


def written_to_terminal(
    command: Sequence[str], directory: Path, programs: Programs | None = None, **variables: str
) -> tuple[int, str]:
    """Runs a command in a terminal of 80 columns and 24 lines.

    Args:
        programs: runs the command, which has to be a Python program; without them it is a new process.
        variables: of the environment.

    Returns its exit code, and all that it writes, with escape sequences.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"PYTHONPATH": path, "TERM": "xterm"} | variables
    if programs is not None:
        programs.start(command[1:], directory, [os.ttyname(theirs)] * 3, environment)
        wait = programs.wait
    else:
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        wait = subprocess.Popen(command, cwd=directory, env=environment, **streams).wait
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # the terminal's other side is closed
        pass
    finally:
        os.close(ours)
    return wait(), seen.decode()


def lines_of(written: str) -> list[str]:
    """Returns the lines that are left in a terminal, without progress bars, which are erased."""
    # A bar is erased: up by one line, and all of that is cleared.
    text = re.sub(r"[^\n]*\n(\x1b\[\?25h)?\r?\x1b\[1A\x1b\[2K", "", written.replace("\r\n", "\n"))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    return [line.rpartition("\r")[2] for line in plain.split("\n")]
