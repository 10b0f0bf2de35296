"""An open load: what our hooks know of it that Megatron's functions between them do not hand on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from megatron_datastates.config import Options

if TYPE_CHECKING:
    from megatron_datastates.mcore.load.metadata import Boxes
    from megatron_datastates.pipeline.load_report import LoadTracker


@dataclasses.dataclass
class Load:
    """The open load of this thread, from the outermost of our hooks on."""

    options: Callable[[], Options] = Options.from_environment  # Megatron's training loop has arguments, too
    in_training_loop: bool = False  # within load_checkpoint, which all ranks call
    failed_alike: bool = False  # on all ranks, so that they may go on together
    directory: str | None = None  # that Megatron's maybe_load_config was last asked for
    agreement: Any = None  # between ranks (agreement.py), where several take part; else None
    tracker: LoadTracker | None = None  # of the load that is being reported, if any
    boxes: Boxes | None = None  # that are wanted of each tensor


_open: ContextVar[Load | None] = ContextVar("the open load", default=None)


def current() -> Load:
    """Returns the open load; a new one, which nobody else sees, where none is."""
    return _open.get() or Load()


@contextlib.contextmanager
def opened(**facts: Any) -> Iterator[Load]:
    """Goes on with the open load, or opens one. `facts` are fields that it has until the block ends."""
    load = current()
    before = {name: getattr(load, name) for name in facts}
    token = _open.set(load)
    try:
        for name, value in facts.items():
            setattr(load, name, value)
        yield load
    finally:
        _open.reset(token)
        for name, value in before.items():
            setattr(load, name, value)
