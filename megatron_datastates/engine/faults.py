"""Injected failures at the steps that Python takes, so that tests can prove what a crash leaves.

The same plan (`Options.faults`) covers the native module's system calls; cuda/os/faults.h describes its
syntax. In production it is empty.
"""

from __future__ import annotations

import collections
import errno
import os
import signal
import time

from megatron_datastates.errors import OptionError

SMALL_FILE_OPERATIONS = tuple(
    f"{step} {file}"
    for file in ("index", "manifest", "metadata")
    for step in ("write", "rename", "sync directory of", "durable")
)
REMOVAL_OPERATIONS = ("remove manifest", "sync removal of manifest", "remove file", "remove directory")
OPERATIONS = (
    "open", "reserve", "write", "truncate", "sync", "sync directory", "read",  # the native module's
    *SMALL_FILE_OPERATIONS,
    *REMOVAL_OPERATIONS,
    "write removal",  # precedes those in an object store
    "look at left-over", "remove left-over",
    "link", "sync link",
    "drain read", "drain write", "drain sync", "drain rename",
    "replica read", "replica sync", "replica rename",
    "write journal", "write weights", "publish weights", "remove replaced", "renew sums",
)  # fmt: skip


class Faults:
    """Counts the calls of named points and makes the planned ones fail.

    Raises:
        OptionError: the plan names an operation that does not exist, and so would never happen.
    """

    def __init__(self, plan: str) -> None:
        self._entries = [entry.split(":") for entry in plan.split(",") if entry]
        unknown = [entry[0] for entry in self._entries if entry[0] not in OPERATIONS]
        if unknown:
            raise OptionError(f"the fault plan {plan!r} names {unknown[0]!r}; there are {OPERATIONS}")
        self._passed: collections.Counter[str] = collections.Counter()

    def point(self, name: str) -> None:
        """Raises OSError, kills this process or sleeps if the plan says so for this call."""
        self._passed[name] += 1
        for operation, nth, effect in self._entries:
            if operation == name and int(nth) in (0, self._passed[name]):
                _happen(name, effect)


def _happen(name: str, effect: str) -> None:
    if effect == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if effect.startswith("stall="):
        time.sleep(int(effect[6:]) / 1000)
    if hasattr(errno, effect):
        code = getattr(errno, effect)
        raise OSError(code, f"{os.strerror(code)} (injected)", name)
