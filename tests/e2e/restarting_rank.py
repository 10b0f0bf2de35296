"""One rank of a tiny pretraining that is restarted within its process, as nvidia-resiliency-ext does that.

A thread of its own ends torch.distributed, aborts Megatron's queue, and raises an exception in the trainer's
thread, wherever that is. Then Megatron's global state is destroyed, and `pretrain` is called again.
"""

import ctypes
import functools
import inspect
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretrain_tiny
import tiny_rank
import torch.distributed as dist
from megatron.training import async_utils, get_args
from megatron.training import training as loop

STEPS_BETWEEN = 6
RESTARTS = 5
MOST_DELAY_SECONDS = 0.04  # about two iterations


class RankShouldRestart(BaseException):
    """As nvidia-resiliency-ext calls its own."""


class Strike(threading.Thread):
    """Restarts the trainer's thread some time after a step of that number."""

    def __init__(self, recorder: tiny_rank.Recorder, step: int, delay_seconds: float) -> None:
        super().__init__(daemon=True)
        self._recorder, self._step, self._delay_seconds = recorder, f"step {step}", delay_seconds
        self._trainer = threading.get_ident()

    def run(self) -> None:
        while self._step not in self._recorder.states:
            time.sleep(0.001)
        time.sleep(self._delay_seconds)
        strategy = getattr(get_args(), "async_strategy", None)
        dist.destroy_process_group()
        wanted = inspect.signature(async_utils.reset_persistent_async_worker).parameters
        async_utils.reset_persistent_async_worker(*([strategy] if wanted else []))
        restart_in(self._trainer)


def restart_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(RankShouldRestart))


def raise_again(raised: Any) -> None:
    """Raises it anew where a finalizer met it, as that extension does: later, or this call would meet it."""
    if raised.exc_type is RankShouldRestart:
        threading.Timer(0.01, restart_in, [threading.get_ident()]).start()
    else:
        sys.__unraisablehook__(raised)


def train(strike: Callable[[int], Strike]) -> None:
    """Trains to the end, restarted RESTARTS times."""
    for attempt in range(RESTARTS):
        striking = strike(attempt)
        striking.start()
        try:
            try:
                pretrain(attempt)
            except Exception:
                if dist.is_initialized():
                    raise
                # torch.distributed is gone. The exception of the other thread follows, or the test times out.
            while True:
                time.sleep(0.001)
        except RankShouldRestart:
            striking.join()
            loop.destroy_global_state()
    pretrain(RESTARTS)


def pretrain(attempt: int) -> None:
    original = pretrain_tiny.pretrain
    store = dist.PrefixStore(str(attempt), dist.HashStore())
    pretrain_tiny.pretrain = functools.wraps(original)(functools.partial(original, store=store))
    try:
        pretrain_tiny.main()
    finally:
        pretrain_tiny.pretrain = original


def main(arguments: list[str], folder: str) -> None:
    sys.argv = ["pretrain_tiny.py", *arguments]
    sys.unraisablehook = raise_again
    recorder = tiny_rank.Recorder()
    recorder.attach()
    delays = random.Random(os.environ["SEED"])

    def strike(attempt: int) -> Strike:
        return Strike(recorder, STEPS_BETWEEN * (attempt + 1), delays.uniform(0.0, MOST_DELAY_SECONDS))

    train(strike)
    Path(folder, "rank0.json").write_text(json.dumps(recorder.record()))
