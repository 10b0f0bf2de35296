"""What the main process of benchmarks.gpu and the processes of its parts agree on. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAKE = "DATASTATES_BENCH_FAKE"  # "1": a try without a GPU, on the fake driver; inherited by all processes
FAKE_FOLDER = "DATASTATES_BENCH_FAKE_FOLDER"  # where the fake driver is built, once for all processes
MEMORY = "DATASTATES_BENCH_MEMORY_GIB"  # host memory of the machine, where its system shows less at first
TMPFS = Path("/dev/shm")
IS_FAKE = os.environ.get(FAKE) == "1"  # in a part's process

# The hardware queues that CUDA may use, and those of them for copies; it reads both once, at its start.
CONNECTIONS, COPY_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
# What the name of a part ends with that runs with one queue, as many users of Megatron do; and with eight for
# copies beside it.
ONE, EIGHT = "_one_connection", "_8_for_copies"
SETTINGS = {ONE: {CONNECTIONS: "1"}, EIGHT: {CONNECTIONS: "1", COPY_CONNECTIONS: "8"}}
CONNECTIONS_LIMIT = os.environ.get(CONNECTIONS)  # where it was limited before this process began


def split(part: str) -> tuple[str, dict[str, str]]:
    """Returns the part's name without what says how it runs, and the environment that this stands for."""
    for suffix, settings in SETTINGS.items():
        if part.endswith(suffix):
            return part.removesuffix(suffix), settings
    return part, {}
