"""A program that is interrupted within a save, where it sets or awaits what the save's threads await or set.

A tracing function raises KeyboardInterrupt between two bytecodes of such a call, as a signal handler may.
Then the program steps, saves again, and loads what it has saved: nothing may hang. That is repeated with each
`STRIDE`th bytecode of a save's calls.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megatron_datastates as ds
from megatron_datastates import flag
from megatron_datastates.pipeline.saver_pool import close_all

LIMIT_SECONDS = 10.0
STRIDE = 5
WAITS = {flag.__file__, threading.__file__}  # the second one, in case somebody goes back to threading.Event

model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2)])
optimizer = torch.optim.Adam(model.parameters())


class Interrupts:
    """Raises KeyboardInterrupt before one bytecode of the functions that wait; `places` has the callers."""

    def __init__(self) -> None:
        self.left = 0
        self.places: set[str] = set()

    def trace(self, frame: types.FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in WAITS or frame.f_code.co_name == "__init__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                self._note(frame)
                raise KeyboardInterrupt
        return self.trace

    def _note(self, frame: types.FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename in WAITS:
            frame = frame.f_back
        assert frame is not None
        self.places.add(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")

    def interrupt(self, act: Callable[[], object], number: int) -> bool:
        """Returns whether `act` was interrupted before the bytecode of that number, from 1 on."""
        self.left = number
        sys._getframe().f_trace_opcodes = True  # 3.12 looks for such a frame when tracing begins
        sys.settrace(self.trace)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def step() -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()


def save(directory: Path) -> None:
    handle = ds.async_save(
        {"m": dict(model.named_parameters()), "o": optimizer.state_dict()}, directory, lazy=True
    )
    handle.done()
    step()
    handle.wait()


def main(root: Path) -> None:
    logging.disable(logging.CRITICAL)
    step()
    save(root / "first")
    interrupts, number = Interrupts(), 1
    while True:
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
        if not interrupts.interrupt(functools.partial(save, root / f"interrupted{number}"), number):
            break
        step()
        weight = model[0].weight.detach().clone()
        handle = ds.async_save({"m": dict(model.named_parameters())}, root / f"later{number}", lazy=True)
        step()
        handle.wait()
        assert torch.equal(ds.load(root / f"later{number}")["m.0.weight"], weight)
        number += STRIDE
    close_all()
    faulthandler.cancel_dump_traceback_later()
    print(number, *sorted(interrupts.places))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
