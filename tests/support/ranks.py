"""Runs a Python function in N freshly forked ranks: new processes, without new imports.

    with RankForge(preload=["torch"], path=[...]) as forge:
        outcome = forge.run("my_module:my_function", ranks=2, arguments=["x"], logs=tmp_path)

A rank is a new process: it sees nothing that an earlier rank did. Its environment has RANK,
WORLD_SIZE and the rest as under torchrun, and its rendezvous store is already serving, so that
`torch.distributed.init_process_group("gloo")` works. It starts with every module that its parent
(`zygote.py`) has imported. Its target is found through `path`, or in this folder.

What belongs here: the tests' end of the pipe to that parent. What does not: what the ranks do.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

POLL_SECONDS = 0.01
LOG_TAIL = 6000


@dataclass(frozen=True)
class Outcome:
    """The exit code of each rank (negative: the signal that killed it) and what the ranks printed."""

    exits: list[int]
    log: str

    def succeeded(self) -> Self:
        """Returns this outcome. Raises AssertionError, with the log's end, unless all ranks exited with 0."""
        assert not any(self.exits), (
            f"exit codes {self.exits}, expected zeros; the log ends:\n{self.log[-LOG_TAIL:]}"
        )
        return self


class Job:
    """Running ranks: `wait` for them, or `kill` them."""

    def __init__(self, ask: Callable[..., dict[str, Any]], pids: list[int], logs: Path) -> None:
        self._ask, self.pids, self._logs = ask, pids, logs

    def exits(self) -> list[int | None]:
        """Returns the exit code of each rank, None for those still running."""
        codes: list[int | None] = self._ask(do="poll", pids=self.pids)["exits"]
        return codes

    def log(self) -> str:
        """Returns what the ranks have printed so far, rank by rank."""
        files = sorted(self._logs.glob("rank*.log"))
        return "".join(f"--- {file.stem}\n{file.read_text(errors='replace')}" for file in files)

    def wait(self, timeout_seconds: float, *, spare_peers: bool = False) -> Outcome:
        """Waits for all ranks.

        When one fails, its peers are killed unless `spare_peers`. When the ranks take longer than
        `timeout_seconds`, all are killed, and the TimeoutError shows their stacks.
        """
        deadline = time.monotonic() + timeout_seconds
        while None in (codes := self.exits()):
            if any(codes) and not spare_peers:
                time.sleep(0.5)  # lets the peers print what they saw of it
                return self.kill()
            if time.monotonic() > deadline:
                self._show_stacks()
                tail = self.kill().log[-LOG_TAIL:]
                raise TimeoutError(f"ranks ran past {timeout_seconds} s; the log ends:\n{tail}")
            time.sleep(POLL_SECONDS)
        return Outcome([code for code in codes if code is not None], self.log())

    def wait_until(self, seen: Callable[[], bool], timeout_seconds: float) -> None:
        """Waits until `seen()`. Raises AssertionError if a rank ends first, or after `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        while not seen():
            codes = self.exits()
            early = any(code is not None for code in codes)
            if early or time.monotonic() > deadline:
                log = self.kill().log
                raise AssertionError(
                    f"not seen within {timeout_seconds} s, or before a rank ended (exit codes {codes}); "
                    f"the log ends:\n{log[-LOG_TAIL:]}"
                )
            time.sleep(POLL_SECONDS)

    def kill(self) -> Outcome:
        """Sends SIGKILL to every running rank at once and waits for their ends."""
        self._ask(do="signal", pids=self.pids, signal=int(signal.SIGKILL))
        while None in (codes := self.exits()):
            time.sleep(POLL_SECONDS)
        return Outcome([code for code in codes if code is not None], self.log())

    def _show_stacks(self) -> None:
        self._ask(do="signal", pids=self.pids, signal=int(signal.SIGUSR1))
        time.sleep(0.5)


class RankForge:
    """A parent process that imports `preload` ("module", or "module:function" to call) and forks jobs.

    `environment` is added to the parent's, for what a fork can no longer be given (LD_PRELOAD).
    """

    def __init__(
        self, preload: Sequence[str], path: Sequence[Path] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        found = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
        its_own = os.environ | {
            "PYTHONPATH": os.pathsep.join(found),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, str(Path(__file__).with_name("zygote.py")), *preload]
        self._parent = subprocess.Popen(
            command,
            env=its_own | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._read_answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the parent and every rank that it forked."""
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(timeout=30)

    def kill(self) -> None:
        """Ends the parent by SIGKILL; its ranks end with it."""
        self._parent.kill()
        self._parent.communicate()

    def start(
        self,
        target: str,
        *,
        ranks: int,
        logs: Path,
        arguments: Sequence[object] = (),
        environment: dict[str, str] | None = None,
    ) -> Job:
        """Forks `ranks` processes that call `target` ("module:function") with `arguments`.

        The arguments are sent as JSON; rank N writes its output to LOGS/rankN.log.
        """
        logs.mkdir(parents=True, exist_ok=True)
        answer = self._ask(
            do="start",
            target=target,
            arguments=list(arguments),
            ranks=ranks,
            environment=environment or {},
            logs=str(logs),
        )
        return Job(self._ask, answer["pids"], logs)

    def run(self, target: str, *, timeout_seconds: float = 60.0, **job: Any) -> Outcome:
        """Starts the job and waits for it."""
        return self.start(target, **job).wait(timeout_seconds)

    def _ask(self, **request: object) -> dict[str, Any]:
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(request) + "\n")
        return self._read_answer()

    def _read_answer(self) -> dict[str, Any]:
        assert self._parent.stdout is not None
        line = self._parent.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the parent of the ranks ended with exit code {self._parent.wait()}; see its stderr"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer
