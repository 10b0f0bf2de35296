"""One rank of a training run, which records when it was in a step, in a save, in a poll and in a fence."""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_datastates.engine.reader import Reader
from megatron_datastates.pipeline.near import recovery
from megatron_datastates.pipeline.near.copying import Limit
from megatron_datastates.plan.reads import ReadSpans

_NEVER = 1 << 40  # iterations


class Recorder:
    """Wraps functions of Megatron's training loop, and this package's fence, with stopwatches.

    The functions do what they did: training runs as it would without this.
    """

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[float, float]]] = {}

    def attach(self) -> None:
        """Records `step`, `save`, `poll`, `fence`, `load` and, within it, `recover` from now on."""
        from megatron.training import training as loop

        from megatron_datastates.engine.fence import FENCE
        from megatron_datastates.pipeline.near import recovery

        for owner, function, name in (
            (loop, "train_step", "step"),
            (loop, "save_checkpoint", "save"),
            (loop, "maybe_finalize_async_save", "poll"),
            (FENCE, "wait", "fence"),
            (loop, "load_checkpoint", "load"),
            (recovery, "recover_newest", "recover"),
        ):
            setattr(owner, function, self._timed(name, getattr(owner, function)))

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        spans = self.spans.setdefault(name, [])

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spans.append((begin, time.perf_counter()))

        return timed


def allow_fork() -> None:
    """Lets `--async-save` fork at every save, as older releases did.

    Megatron 0.19 asks for a persistent worker. That one receives a CPU's tensors in shared memory, and would
    write what later steps have made of them.
    """
    from megatron.training import arguments

    original = arguments.validate_args

    def validate_args(args: Any, *more: Any, **options: Any) -> Any:
        args.use_persistent_ckpt_worker = True
        validated = original(args, *more, **options)
        args.use_persistent_ckpt_worker = validated.use_persistent_ckpt_worker = False
        return validated

    arguments.validate_args = validate_args


def save_in_turns(block: int, saves: int = 0) -> None:
    """Saves in every iteration of every other block of so many, beginning with the second block.

    Args:
        block: iterations.
        saves: if not 0, only the first so many iterations of such a block end with a save.
    """
    from megatron.training import training as loop
    from megatron.training.global_vars import get_args

    original, numbers = loop.train_step, itertools.count()

    @functools.wraps(original)
    def train_step(*args: Any, **options: Any) -> Any:
        number = next(numbers)
        is_saved = number // block % 2 == 1 and number % block < (saves or block)
        get_args().save_interval = 1 if is_saved else _NEVER
        return original(*args, **options)

    loop.train_step = train_step


def limit_far(folder: Path, bytes_per_second: int) -> Callable[[], int]:
    """Lets data files below a folder be read, and brought there before a load, as from storage of this rate.

    Files are read as ever; then the rest of that time is waited for. Small files are not limited.

    Returns:
        what returns the number of bytes that were read there so far.
    """
    original, lock = Reader.read, threading.Lock()
    total, free_at = 0, 0.0

    def read(reader: Reader, sources: Any, spans: ReadSpans, *rest: Any, **options: Any) -> Any:
        nonlocal total, free_at
        is_there = np.array([path.is_relative_to(folder) for path, _ in sources], np.bool_)
        count = int((spans.row_bytes * spans.rows)[is_there[spans.files]].sum())
        with lock:
            total += count
            free_at = end = max(free_at, time.monotonic()) + count / bytes_per_second
        outcome = original(reader, sources, spans, *rest, **options)
        if count:
            time.sleep(max(end - time.monotonic(), 0.0))
        return outcome

    recovery.Limit = lambda _: Limit(bytes_per_second)  # type: ignore[attr-defined, assignment]
    Reader.read = read  # type: ignore[method-assign, assignment]
    return lambda: total


def run(
    place: tuple[int, int, int],
    arguments: Sequence[str],
    record: Path,
    forks: bool,
    far: tuple[Path, int] | None = None,
    save_blocks: int = 0,
) -> None:
    """Trains with these arguments, prints to a log beside the record, and writes the record at the end.

    Args:
        far: a folder, and the rate in bytes a second at which this rank is to read and write there.
        save_blocks: if not 0, only every other block of so many iterations saves; the first one does not.
    """
    rank, ranks, port = place
    log = os.open(record.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    os.environ |= dict(zip(names, map(str, (rank, rank, ranks, ranks, port)), strict=True))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    from benchmarks.training.preload import pretrain_tiny

    sys.argv = ["pretrain_tiny.py", *arguments]
    if forks:
        allow_fork()
    recorder = Recorder()
    recorder.attach()
    if save_blocks:
        save_in_turns(save_blocks)
    read_there = limit_far(*far) if far is not None else None
    pretrain_tiny.main()
    from megatron_datastates.pipeline.saver_pool import close_all

    begin = time.perf_counter()
    close_all()  # as at the end of a program, which a forked process does not reach
    recorder.spans["drain"] = [(begin, time.perf_counter())]
    if read_there is not None:
        recorder.spans["far bytes"] = [(0.0, float(read_there()))]
    record.write_text(json.dumps(recorder.spans))
