"""What the main process of benchmarks.gpu and the processes of its parts agree on. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAKE = "DATASTATES_BENCH_FAKE"  # "1": a try without a GPU, on the fake driver; inherited by all processes
FAKE_FOLDER = "DATASTATES_BENCH_FAKE_FOLDER"  # where the fake driver is built, once for all processes
MEMORY = "DATASTATES_BENCH_MEMORY_GIB"  # host memory of the machine, where its system shows less at first
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # the hardware queues that CUDA may use; read once, at its start
TMPFS = Path("/dev/shm")
ONE = "_one_connection"  # ends the name of a part that runs with CUDA_DEVICE_MAX_CONNECTIONS=1
IS_FAKE = os.environ.get(FAKE) == "1"  # in a part's process
CONNECTIONS_LIMIT = os.environ.get(CONNECTIONS)  # where it was limited before this process began
