"""What one save is, the milestones that it passes on each rank, and the error that ends it there."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path

from megatron_datastates.errors import DataStatesError, printable
from megatron_datastates.format.values import SaveId


class State(enum.Enum):
    """The milestones of a save, as one rank knows them."""

    ENQUEUED = "enqueued"  # the engine still reads memory that may change at the next fence
    STAGED = "staged"  # everything that may change has been copied, and did not change before
    WRITTEN = "written"  # all data is in the file, and the footer that seals it is being written
    DURABLE = "durable"  # the file survives a crash
    PUBLISHED = "published"  # a manifest names it: all ranks' files are a checkpoint
    FAILED = "failed"  # on this rank, or by agreement


@dataclasses.dataclass(frozen=True)
class SaveContext:
    """The identity and the target directory of one rank's save.

    Attributes:
        directory: of the checkpoint.
        near: where this rank's file is written first, in the near tier of its node (pipeline/near/); None if
            it is written into `directory`.
    """

    save_id: SaveId
    directory: Path
    rank: int
    world_size: int
    iteration: int | None = None
    near: Path | None = None

    @property
    def folder(self) -> Path:
        """Returns the directory that this rank's file is written into."""
        return self.near or self.directory


class FirstError:
    """The first error of a rank's save, on whichever thread it comes. Thread-safe, without a lock."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, BaseException]] = {}  # at most one; each use of it is atomic

    @property
    def text(self) -> str | None:
        return self._found["first"][0] if self._found else None

    @property
    def cause(self) -> BaseException | None:
        return self._found["first"][1] if self._found else None

    def record(self, error: BaseException) -> bool:
        """Keeps an error, unless another one came first; returns whether it is kept."""
        name = type(error).__name__
        try:
            ours = isinstance(error, DataStatesError)
            text = printable(str(error) if ours else f"{name}: {error}", keep="\n")
        except Exception:  # a class of somebody's own
            text = name
        found = (text, error)
        return self._found.setdefault("first", found) is found
