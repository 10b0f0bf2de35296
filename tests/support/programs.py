"""Runs Python programs, `-m MODULE` or `-c CODE`, in fresh forks of a process that has imported torch.

    with Programs(["torch"]) as programs:
        ended = programs.run(["-m", "megatron_datastates", "ls", "run"], cwd=folder)

A start of Python that imports torch takes seconds, a fork takes milliseconds. A program is a new process that
sees nothing of earlier ones; its interpreter ends as any other does. For what a program does; what a start
imports is tested with `subprocess`.

What belongs here: both ends of the pipe to that process. What does not: what the programs do.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Programs:
    """A process that imports `preload` and forks programs, one at a time."""

    def __init__(self, preload: Sequence[str] = ("torch",)) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._server = subprocess.Popen(
            [sys.executable, __file__, *preload],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, and with it a program that still runs."""
        self._server.kill()
        self._server.communicate()

    def run(
        self,
        words: Sequence[object],
        *,
        cwd: Path = ROOT,
        timeout: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Does as `subprocess.run([sys.executable, *words], capture_output=True, text=True)`.

        After a timeout no further program can be run.
        """
        with tempfile.TemporaryDirectory() as folder:
            files = [os.devnull, *(str(Path(folder, name)) for name in ("stdout", "stderr"))]
            self.start(words, cwd, files, environment)
            code = self.wait(timeout)
            stdout, stderr = (Path(file).read_text() for file in files[1:])
        return subprocess.CompletedProcess([sys.executable, *map(str, words)], code, stdout, stderr)

    def start(
        self,
        words: Sequence[object],
        cwd: Path,
        files: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts a program with `files` as its standard input, output and error; it has opened them then."""
        assert self._server.stdin is not None
        request = {
            "words": list(map(str, words)),
            "cwd": str(cwd),
            "files": list(files),
            "environment": {**(os.environ if environment is None else environment)},
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._read_answer(120.0)

    def wait(self, timeout: float = 120.0) -> int:
        """Returns the exit code of the program that was started; negative: the signal that killed it."""
        return int(self._read_answer(timeout)["exit"])

    def _read_answer(self, timeout: float) -> dict[str, Any]:
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], timeout)[0]:
            self.close()
            raise TimeoutError(f"the program ran past {timeout} s")
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer


def serve() -> Iterator[dict[str, Any]]:
    """Forks a program for each request on stdin; yields its request in the fork only."""
    answers, parent = os.fdopen(os.dup(1), "w", buffering=1), os.getpid()
    for line in sys.stdin:
        request = json.loads(line)
        opened = [os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOCTTY) for file in request["files"]]
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != parent:  # the parent ended before prctl
                os._exit(1)
            answers.close()
            for number, descriptor in enumerate(opened):
                os.dup2(descriptor, number)
                os.close(descriptor)
            yield request
            return
        for descriptor in opened:
            os.close(descriptor)
        print(json.dumps({"pid": pid}), file=answers)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), file=answers)


def run_program(request: dict[str, Any]) -> None:
    """Runs the program of a request in this process."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    kind, program, *arguments = request["words"]
    sys.path[0] = request["cwd"]
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(module))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forks share the pages of these objects as long as no collection touches them
    for request in serve():
        run_program(request)
