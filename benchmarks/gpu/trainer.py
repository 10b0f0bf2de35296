"""Trains with Megatron's own loop on the GPU, and records what each save held it for.

A process of its own, because Megatron's world and its arguments are the process's. On the fake driver it
trains on the CPU, with the stand-ins of `recipes/cpu`.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import hashlib
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import IS_FAKE, ROOT

RECIPES = ROOT / "recipes"


def main() -> None:
    """Trains with the arguments after `--`; writes the record when training has ended well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--save-blocks", type=int, default=0, help="save once in every other block")
    parser.add_argument("--save-each", action="store_true", help="save in each iteration of such a block")
    parser.add_argument("--digest-save", type=int, default=0, help="digest the state before this save")
    parser.add_argument("--digest-load", action="store_true", help="digest the state after set-up")
    parser.add_argument("--count", action="store_true", help="count what threads do in each step")
    parser.add_argument("--dump-after", type=float, help="seconds until all threads' stacks are logged")
    own = sys.argv.index("--")
    wanted = parser.parse_args(sys.argv[1:own])
    if wanted.dump_after:
        faulthandler.dump_traceback_later(wanted.dump_after)
    sys.argv = ["pretrain_tiny.py", *sys.argv[own + 1 :]]
    pretrain_tiny = _import_megatron()

    from benchmarks.training.rank import Recorder, save_in_turns

    recorder = Recorder()
    recorder.attach()
    if wanted.save_blocks:
        save_in_turns(wanted.save_blocks, saves=0 if wanted.save_each else 1)
    digests = Digests(wanted.digest_save, wanted.digest_load)
    digests.attach()
    counters = Counters()
    if wanted.count:
        counters.attach()
    pretrain_tiny.main()
    facts: dict[str, Any] = {"spans": recorder.spans, "saved": digests.saved, "loaded": digests.loaded}
    facts |= {"counters": counters.found}
    wanted.record.write_text(json.dumps(facts))


def _import_megatron() -> Any:
    """Imports Megatron as with this package and a fused Adam installed; returns the training script."""
    sys.path[:0] = [str(RECIPES), str(RECIPES / "cpu")]
    if IS_FAKE:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        importlib.import_module("stand_ins").install()
    else:
        importlib.import_module("fused_adam").install()  # stock Megatron loads no other's state
    importlib.import_module("megatron_datastates.mcore")  # it may not be installed here
    return importlib.import_module("pretrain_tiny")


class Counters:
    """Of each step: the processor time and waits of the threads that train, and the machine's interrupts.

    Where a step takes longer, and its threads have computed no longer but waited more often, something held a
    lock that they needed.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, int]] = []

    def attach(self) -> None:
        """Wraps Megatron's step. The first counts the time before it, too."""
        from megatron.training import training as loop

        step, before = loop.train_step, dict.fromkeys(self._read(), 0)

        @functools.wraps(step)
        def train_step(*args: Any, **options: Any) -> Any:
            nonlocal before
            result = step(*args, **options)
            now = self._read()
            self.found.append({name: value - before.get(name, 0) for name, value in now.items()})
            before = now
            return result

        loop.train_step = train_step

    @staticmethod
    def _read() -> dict[str, int]:
        """Returns nanoseconds of processor time, and numbers of voluntary waits and of interrupts."""
        found: dict[str, int] = {"interrupts": _interrupts()}
        for task in Path("/proc/self/task").iterdir():
            try:
                name = (task / "comm").read_text().strip()
                kind = "main" if task.name == str(os.getpid()) else "autograd" if "autograd" in name else ""
                kind = "ours" if name.startswith("ds-") else kind or "others"
                waits = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.M)
                busy = int((task / "schedstat").read_text().split()[0])
            except OSError:  # the thread has ended
                continue
            found[f"{kind}_ns"] = found.get(f"{kind}_ns", 0) + busy
            found[f"{kind}_waits"] = found.get(f"{kind}_waits", 0) + int(waits[1] if waits else 0)
        return found


def _interrupts() -> int:
    with open("/proc/stat") as statistics:
        return next(int(line.split()[1]) for line in statistics if line.startswith("intr "))


class Digests:
    """A digest of all parameters and optimizer state, as saved and as loaded; one changed bit changes it.

    Args:
        before_save: number of the save, from 1, before which the state is digested; 0: none.
        after_load: whether it is digested once Megatron has set up, and loaded.
    """

    def __init__(self, before_save: int, after_load: bool) -> None:
        self._before_save, self._after_load = before_save, after_load
        self._working: tuple[Any, Any] | None = None
        self._saves = 0
        self.saved: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}

    def attach(self) -> None:
        """Wraps what Megatron's training loop calls to set up and to save."""
        from megatron.training import training as loop
        from megatron.training.global_vars import get_args

        set_up, save = loop.setup_model_and_optimizer, loop.save_checkpoint

        @functools.wraps(set_up)
        def setup_model_and_optimizer(*args: Any, **options: Any) -> Any:
            made = set_up(*args, **options)
            self._working = made[0], made[1]
            if self._after_load:
                self.loaded = {"iteration": get_args().iteration} | self._digest()
            return made

        @functools.wraps(save)
        def save_checkpoint(iteration: int, *args: Any, **options: Any) -> Any:
            self._saves += 1
            if self._saves == self._before_save:
                self.saved = {"iteration": iteration} | self._digest()
            return save(iteration, *args, **options)

        loop.setup_model_and_optimizer = setup_model_and_optimizer
        loop.save_checkpoint = save_checkpoint

    def _digest(self) -> dict[str, Any]:
        begin, digest, tensors, size = time.perf_counter(), hashlib.sha256(), 0, 0
        assert self._working is not None
        for name, tensor in _state(*self._working):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_weighted_sum(tensor)}".encode())
            tensors, size = tensors + 1, size + tensor.nbytes
        seconds = time.perf_counter() - begin
        return {"sha256": digest.hexdigest(), "tensors": tensors, "bytes": size, "seconds": seconds}


def _weighted_sum(tensor: Any) -> int:
    """Returns the sum of a tensor's words, each times an odd weight of its own, modulo 2^64.

    It is computed where the tensor is: hashing gigabytes on the host takes longer than the training.
    """
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = data.view(torch.int32) if data.numel() % 4 == 0 else data
    weights = torch.arange(1, 2 * words.numel(), 2, dtype=torch.int64, device=words.device)
    return int((words.to(torch.int64) * weights).sum())


def _state(model: list[Any], optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yields all parameters and buffers, and the main parameters and moments of each inner optimizer.

    Of Megatron-FSDP only the latter: its parameters are DTensors until the first step after a load, and
    whole ones or empty after a step.
    """
    from megatron.training.global_vars import get_args

    for index, chunk in enumerate([] if get_args().use_megatron_fsdp else model):
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            yield f"model {index} {name}", tensor
    for link, chained in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = chained.optimizer
        for index, group in enumerate(inner.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield f"optimizer {link}.{index}.{position}", _local(parameter)
                for key in ("exp_avg", "exp_avg_sq"):
                    yield f"optimizer {link}.{index}.{position} {key}", _local(inner.state[parameter][key])


def _local(tensor: Any) -> Any:
    """Returns the part of a DTensor that this rank has; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


if __name__ == "__main__":
    main()
