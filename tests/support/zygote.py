"""The process that forks ranks: it imports once what every rank needs; a job is N forks of it.

What belongs here: forking, reaping and killing, driven by JSON lines on stdin and answered on stdout.
What does not: anything about training or checkpoints, and any arithmetic on tensors (a fork of a
process that has used OpenMP hangs in its first parallel loop). `ranks.py` is the other end of the pipe.

Requests, one per line, each answered by one line:
    {"do": "start", "target": "module:function", "arguments": [...], "ranks": n,
     "environment": {...}, "logs": path}           -> {"pids": [...]}
    {"do": "poll", "pids": [...]}                  -> {"exits": [code or null, ...]}
    {"do": "signal", "pids": [...], "signal": n}   -> {}
An exit code is negative for a rank that a signal killed. Ranks still running are killed when stdin
ends, or when this process ends.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

Request = dict[str, Any]
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
PARENT = os.getpid()


@dataclass
class Rank:
    """What a fork is to do. Exists only in the forked process itself."""

    rank: int
    request: Request
    listener: socket.socket

    def enter(self) -> None:
        """Takes a process group, an output file and an environment of its own."""
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # also if the parent crashes
        if os.getppid() != PARENT:  # the parent ended before prctl
            os._exit(1)
        log = (Path(self.request["logs"]) / f"rank{self.rank}.log").open("a")
        with open(os.devnull) as nothing:
            for stream, file in ((sys.stdin, nothing), (sys.stdout, log), (sys.stderr, log)):
                os.dup2(file.fileno(), stream.fileno())
        sys.stdout = sys.stderr = log
        log.reconfigure(line_buffering=True)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        os.environ.update(self._environment())
        tempfile.tempdir = None  # the parent has looked for it; a rank may have another TMPDIR

    def _environment(self) -> dict[str, str]:
        ranks = str(self.request["ranks"])
        launched = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.listener.getsockname()[1]),
            # As under torchrun: every rank is a client of a store that is already serving.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        return {**launched, **self.request["environment"]}

    def run(self) -> None:
        """Calls the target. An exception ends the process as usual."""
        store = self._serve_store() if self.rank == 0 else None
        self.listener.close()
        module, _, function = self.request["target"].partition(":")
        try:
            getattr(importlib.import_module(module), function)(*self.request["arguments"])
        except BaseException:
            settle()
            raise
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            # A gloo thread that releases a tensor while the interpreter is ending aborts the process.
            distributed.destroy_process_group()
        del store

    def _serve_store(self) -> object:
        """Serves the rendezvous on a socket that was bound before the fork, so that no port is raced for."""
        from torch.distributed import TCPStore

        port, descriptor = self.listener.getsockname()[1], self.listener.detach()
        return TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=descriptor)


def settle(most_seconds: float = 10.0) -> None:
    """Waits until no other thread of this process is running, or `most_seconds` have passed.

    For a rank that ends with an exception while a gloo thread is still finishing a collective: a gloo thread
    that releases a tensor while the interpreter is ending aborts the process. Destroying the process group
    instead would wait for ranks that never come.
    """
    idle, end = 0, time.monotonic() + most_seconds
    while idle < 3 and time.monotonic() < end:
        time.sleep(0.01)  # releases the GIL, which such a thread may need
        others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
        idle = 0 if any(_is_running(task) for task in others) else idle + 1


def _is_running(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False  # the thread has ended


class Ranks:
    """The processes forked so far, by pid, with the exit code of those that have ended."""

    def __init__(self) -> None:
        self._exits: dict[int, int | None] = {}

    def start(self, request: Request) -> dict[str, object] | Rank:
        """Forks the ranks of a job and returns their pids; in each fork, returns its Rank."""
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            pids = []
            for rank in range(request["ranks"]):
                if not (pid := os.fork()):
                    return Rank(rank, request, listener.dup())
                with contextlib.suppress(OSError):  # the rank does so, too: either may be first
                    os.setpgid(pid, pid)
                pids.append(pid)
        self._exits.update(dict.fromkeys(pids))
        return {"pids": pids}

    def poll(self, request: Request) -> dict[str, object]:
        for pid in [pid for pid in request["pids"] if self._exits[pid] is None]:
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                self._exits[pid] = os.waitstatus_to_exitcode(status)
        return {"exits": [self._exits[pid] for pid in request["pids"]]}

    def signal(self, request: Request) -> dict[str, object]:
        """Signals the process group of each running rank, which includes the processes that it started."""
        for pid in request["pids"]:
            if self._exits[pid] is None:
                os.killpg(pid, request["signal"])
        return {}

    def kill_all(self) -> None:
        self.signal({"pids": list(self._exits), "signal": signal.SIGKILL})


def serve(requests: TextIO, answers: TextIO) -> Rank | None:
    """Answers requests until they end. In a forked rank, returns its Rank at once."""
    ranks = Ranks()
    verbs = {"start": ranks.start, "poll": ranks.poll, "signal": ranks.signal}
    for line in requests:
        request = json.loads(line)
        answer = verbs[request["do"]](request)
        if isinstance(answer, Rank):
            return answer
        print(json.dumps(answer), file=answers, flush=True)
    ranks.kill_all()
    return None


def preload(names: list[str]) -> None:
    """Imports each "module", or imports and calls "module:function"."""
    for name in names:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.collect()
    gc.freeze()  # forks share the pages of these objects as long as no collection touches them


def exit_code(run: Callable[[], None]) -> int:
    """Calls `run` and returns the code that Python would exit with after it."""
    try:
        run()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def leave(code: int) -> None:
    """Ends this process as Python does, but for the end of the interpreter itself.

    That takes a rank a second, since it writes to most of the memory that it shares with its parent.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    """Preloads the modules named in argv, then serves."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        preload(sys.argv[1:])
        print(json.dumps({"ready": True}), file=answers, flush=True)
        rank = serve(sys.stdin, answers)
    if rank is not None:
        rank.enter()
        leave(exit_code(rank.run))


if __name__ == "__main__":
    main()
