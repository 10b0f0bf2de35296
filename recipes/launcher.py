"""Starts, watches and kills a training run of several processes on this machine, for the demo.

What belongs here: processes and their log. What does not: what is trained, and checkpoints.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import psutil

HERE = Path(__file__).parent
POLL_SECONDS = 0.05
STEP = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?lm loss: (\S+)")


class RunFailed(Exception):
    """A run failed, or did not do what was expected of it; `log` is the file with its output."""

    def __init__(self, reason: str, log: Path) -> None:
        super().__init__(reason)
        self.log = log


class Run:
    """One training run: torchrun and its workers, which write to one log."""

    def __init__(
        self, arguments: Sequence[str], *, ranks: int, log: Path, runner: Path = HERE / "cpu" / "run.py"
    ) -> None:
        """Starts `pretrain_tiny.py` on the CPU, by `runner`, with `tiny.args` and then these arguments."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
        script = [str(runner), str(HERE / "pretrain_tiny.py")]
        everything = (HERE / "tiny.args").read_text().split() + list(arguments)
        environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*launcher, *script, *everything],
                env=environment | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def losses(self) -> dict[int, float]:
        """Returns the loss of each iteration in the log."""
        return {int(step): float(loss) for step, loss in STEP.findall(self.text())}

    def wait_until(self, seen: Callable[[], bool], what: str, timeout_seconds: float) -> None:
        """Waits until `seen` returns true. Raises RunFailed if the run ends before that, or time is up."""
        deadline = time.monotonic() + timeout_seconds
        while not seen():
            if (code := self._process.poll()) is not None:
                raise RunFailed(f"training ended with exit code {code} before {what}", self.log)
            if time.monotonic() > deadline:
                raise RunFailed(f"waited {timeout_seconds:.0f} s for {what}", self.log)
            time.sleep(POLL_SECONDS)

    def wait(self, timeout_seconds: float) -> None:
        """Waits for the run to end. Raises RunFailed if its exit code is not 0, or time is up."""
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"training took more than {timeout_seconds:.0f} s", self.log) from None
        if code:
            raise RunFailed(f"training ended with exit code {code}", self.log)

    def kill(self) -> int:
        """Sends SIGKILL to every process of the run; returns how many there were."""
        if self._process.poll() is not None:
            return 0
        launcher = psutil.Process(self._process.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        for process in processes:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self._process.wait()
        psutil.wait_procs(processes, timeout=10)
        return len(processes)
