"""The open load: facts that our hooks share, since Megatron's functions between them do not pass them on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_datastates.config import Options

if TYPE_CHECKING:
    from megatron_datastates.dcp.metadata import Boxes
    from megatron_datastates.pipeline.load_report import LoadTracker
    from megatron_datastates.pipeline.loading.load import Checkpoint
    from megatron_datastates.pipeline.loading.optimizer import BucketStates


@dataclasses.dataclass(frozen=True)
class Restated:
    """A restated request and what it needs of the reader."""

    request: dict[str, Any]
    paths: tuple[str, ...]  # of optimizers in the request: the common state has nothing for them
    states: BucketStates | None  # that the checkpoint holds in buckets

    def common_state(self, stored: Any) -> Any:
        """Returns a common state without what was stored of the optimizers."""
        return {key: value for key, value in stored.items() if key not in self.paths}


@dataclasses.dataclass
class Load:
    """The open load of this thread, from the call of our outermost hook until it returns."""

    options: Callable[[], Options] = Options.from_environment  # in the training loop, from its arguments
    restores_providers: Callable[[], bool] = lambda: True
    in_training_loop: bool = False  # within load_checkpoint, which all ranks call
    is_fallback: bool = False  # after a load of a damaged checkpoint, which may have restored something
    failed_on_all_ranks: bool = False  # so that ranks may communicate in handling the failure
    directory: str | None = None  # the last one that Megatron has looked at
    agreement: Any = None  # an agreement.Agreement if several ranks take part
    tracker: LoadTracker | None = None  # of the load that is being reported, if any
    boxes: Boxes | None = None  # the requested ones of each tensor
    objects: Counter[str] = dataclasses.field(default_factory=Counter)  # requests of each, by unique key
    restated: Restated | None = None  # of a request for optimizer state in another parallel layout
    # What it has opened, with which options. Another save may publish there meanwhile, but all that one load
    # reads is of the same save.
    checkpoints: dict[Path, tuple[Options, Checkpoint]] = dataclasses.field(default_factory=dict)


_open: ContextVar[Load | None] = ContextVar("the open load", default=None)


def current() -> Load:
    """Returns the open load; if none is open, a new one that nobody else sees."""
    return _open.get() or Load()


@contextlib.contextmanager
def opened(**facts: Any) -> Iterator[Load]:
    """Continues the open load, or opens one. `facts` are fields of Load, set until the block ends."""
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
