"""What earlier jobs have left in a node's near tier, and when it is removed there.

Their checkpoints may be the only copies of what is not in --save. So they stay until a save of this job is
there, but for those that --save has, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

from megatron_datastates.format.directory import iteration_in_name
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.near.places import folders_of_run, published_in, run_ids_in, save_ids_in
from megatron_datastates.pipeline.runs.history import by_branch
from megatron_datastates.pipeline.runs.runs import is_published

_Folder = tuple[Path, set[SaveId]]  # and whose files are in it


class EarlierJobs:
    """What jobs before this one have left near."""

    def __init__(self) -> None:
        self.is_far = False  # some save of this job. Threads set it, and never take it back
        self._earlier = frozenset[int]()  # run ids of these jobs
        self._own_run_id = 0

    def begin(self, run: Path, own_run_id: int) -> None:
        """Notes which jobs have files in a run's folder in the near tier, once this one has, too.

        After a restart within the process, what it has saved before counts as another job's.
        """
        if own_run_id != self._own_run_id:
            self._own_run_id, self._earlier = own_run_id, run_ids_in(run) - {own_run_id}

    def removable(
        self,
        near: Path,
        far: Path,
        kept: Collection[int],
        spare: Callable[[int], int],
        look: Callable[[], bool],
    ) -> list[_Folder]:
        """Returns the folders in which everything may go now, with the saves whose files these are.

        Args:
            near, far: the run's folder in the near tier, and its directory.
            kept: run ids of saves of this process that are near: it removes these itself.
            spare: returns how many of that many published checkpoints need not stay.
            look: returns whether a save of this job is far.
        """
        published, others = self._left_folders(near, self._earlier.difference(kept))
        if not published and not others:
            return []
        if not self.is_far and look():
            self.is_far = True
        count = spare(len(published))
        # Of what has no manifest here, another node may have it.
        return [
            *(others if self.is_far else []),
            *(self._not_needed(published, near, far)[:count] if count else []),
        ]

    def waits_for_far(self, near: Path, kept: Collection[int]) -> bool:
        """Returns whether something may go once a save of this job is far, which none is known to be yet.

        Args: as those of `removable`.
        """
        return not self.is_far and any(self._left_folders(near, self._earlier.difference(kept)))

    def _left_folders(self, run: Path, earlier: Collection[int]) -> tuple[dict[int, _Folder], list[_Folder]]:
        """Returns published folders by iteration, and others.

        Folders with a file of any other job are not among them: it may still be running.
        """
        published: dict[int, _Folder] = {}
        others: list[_Folder] = []
        with contextlib.suppress(OSError):
            for folder in folders_of_run(run):
                iteration, ids = iteration_in_name(folder.name), save_ids_in(folder)
                # One without files may belong to a save that has just begun.
                if ids and all(save_id.run_id in earlier for save_id in ids):
                    if iteration is not None and is_published(folder):
                        published[iteration] = folder, ids
                    else:
                        others.append((folder, ids))
        return published, others

    def _not_needed(self, published: dict[int, _Folder], near: Path, far: Path) -> list[_Folder]:
        """Returns what no load needs any more, in the order in which it may be removed."""
        paths = {n: path for n, (path, _) in published.items()}
        if not self.is_far:
            paths = {n: path for n, path in paths.items() if _are_same(path, far / path.name)}
        return [published[n] for n in reversed(by_branch(near, paths, len(paths)))]


def _are_same(near: Path, far: Path) -> bool:
    own = published_in(near)
    return own is not None and own == published_in(far)
