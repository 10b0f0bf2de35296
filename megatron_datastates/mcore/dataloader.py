"""The position of a training loop's data loader, in the same checkpoint as the weights.

Megatron's own `--dataloader-save` writes a file for each data-parallel rank while it prepares a checkpoint:
after a crash, one may be there without the other. In a save of ours the position is part of the checkpoint
instead, under the name `dataloader`, and no such file is written.

Megatron loads a checkpoint before it makes data loaders. So a load keeps the position, and
`attach_dataloader` passes it on. A script that never calls it does not train: Megatron's `train` raises an
error first.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch.distributed as dist

from megatron_datastates.errors import ProviderError
from megatron_datastates.mcore.providers import register_loader
from megatron_datastates.pipeline.publishing.collectives import ranks_of, sum_now
from megatron_datastates.providers.base import StateReader
from megatron_datastates.providers.dataloader import DataLoaderState, key_of
from megatron_datastates.providers.objects import ObjectSource


def attach_dataloader(loader: Any, *, strict: bool = True, restore: bool = True) -> bool:
    """Makes a data loader's position part of every later checkpoint, and restores it from the loaded one.

    Call it once, on every rank that makes a loader, before the first batch: with Megatron's own loop where
    the script makes its loader, in `train_valid_test_datasets_provider`.

    Args:
        loader: as in `megatron_datastates.providers.DataLoaderState`: torchdata's StatefulDataLoader,
            Energon's savable loader, or anything with `state_dict` and `load_state_dict`.
        strict: with False, a checkpoint of another number of data-parallel ranks is no error: the loader
            starts from the beginning of its data, with a warning.
        restore: with False, the loader starts from the beginning of its data.

    Returns:
        Whether the loader continues at the position of a loaded checkpoint.

    Raises:
        TypeError: the loader has no such methods.
        MismatchError: the checkpoint was saved with another number of data-parallel ranks.
        ProviderError: a loader is attached already, and Megatron has not called `load_checkpoint` since.
    """
    return LOOP.attach(loader, strict, restore)


class LoopDataLoader:
    """The state provider of the training loop's one data loader, which is made after the load."""

    def __init__(self) -> None:
        self._attached: DataLoaderState | None = None
        self._iterator: Any = None  # of a loop with --dataloader-save and no attached loader
        # Of the last load, with this rank's position, until it is passed to a loader.
        self._loaded: StateReader | None = None
        self._expects_another = False  # loader than the attached one

    def attach(self, loader: Any, strict: bool, restore: bool) -> bool:
        if self._attached is not None and not self._expects_another:
            raise ProviderError(
                "a data loader is attached already: expected one per process. Add others with "
                "enable(providers={name: megatron_datastates.providers.DataLoaderState(loader)})"
            )
        rank, ranks, stores = _place()
        attached = DataLoaderState(loader, rank=rank, ranks=ranks, stores=stores, strict=strict)
        is_set = restore and self._loaded is not None and attached.resume(self._loaded)
        self._attached, self._loaded, self._expects_another = attached, None, False
        register_loader(self)
        return is_set

    def note_iterator(self, train_iterator: Any) -> None:
        """Notes the iterator whose position `--dataloader-save` wants saved, on ranks that have one."""
        self._iterator = train_iterator
        register_loader(self)

    def entries(self) -> Iterable[ObjectSource]:
        """Yields the position of this rank's loader, if this rank stores one."""
        rank, ranks, stores = _place()
        if self._attached is not None:
            return self._attached.entries()
        if self._iterator is None:
            return ()
        loader = _OnlySaves(self._iterator)
        return DataLoaderState(loader, rank=rank, ranks=ranks, stores=stores).entries()

    def restore(self, reader: StateReader) -> None:
        """Restores the position of the attached loader; if there is none, keeps it for the one to come."""
        if self._attached is not None:
            self._attached.restore(reader)
        else:
            rank, ranks, _ = _place()
            keys, own = list(reader.objects), key_of(rank, ranks)
            values = {own: reader.read_object(own)} if own in keys else {}
            read = types.SimpleNamespace(objects=keys, read_object=values.__getitem__)
            self._loaded = cast(StateReader, read)

    def drop_replaced(self) -> None:
        """Drops the attached loader if another one is to come, which the position to be loaded is for."""
        if self._expects_another:
            self._attached = None

    def expect_loader(self, *, is_resume: bool) -> None:
        """Lets another loader be attached: a loop that loads again makes its loader again.

        Args:
            is_resume: whether the load continues a run. Then the position of an earlier load is forgotten.
        """
        # Until then the attached one stays: of a program that makes it before it loads, it is the only one.
        self._expects_another = True
        if is_resume:
            self._loaded = None

    @property
    def awaits_loader(self) -> bool:
        """Returns whether a load has left a position here that no loader was set to yet."""
        return self._loaded is not None

    def require_restored(self, train_iterator: Any) -> None:
        """Checks that nobody has forgotten to restore the data loader. Collective.

        Raises:
            ProviderError: on all ranks, if one has an iterator that starts from the beginning by mistake.
        """
        # With virtual pipeline stages, Megatron passes a list: an iterator, or None, for each of them.
        iterators = train_iterator if isinstance(train_iterator, list) else [train_iterator]
        has_data = any(one is not None for one in iterators)
        is_forgotten = [int(self._loaded is not None and has_data)]
        counts = sum_now(is_forgotten) if len(ranks_of()) > 1 else is_forgotten
        if counts[0]:
            raise ProviderError(
                f"the loaded checkpoint has the position of the data loader, and on {counts[0]} of "
                f"{len(ranks_of())} ranks no loader was set to it: they would start from the beginning of "
                "their data. Call megatron_datastates.mcore.attach_dataloader(loader) where the script makes "
                "its loader, or attach_dataloader(loader, restore=False) to start from the beginning"
            )


class _OnlySaves:
    """A data loader whose state Megatron's `--dataloader-save` would save: an iterator with `save_state`."""

    def __init__(self, train_iterator: Any) -> None:
        loader = getattr(train_iterator, "iterable", train_iterator)
        if not hasattr(loader, "save_state"):
            raise TypeError(
                f"--dataloader-save needs an iterator with a method save_state, found a "
                f"{type(loader).__name__}: or call megatron_datastates.mcore.attach_dataloader(loader)"
            )
        self.state_dict = loader.save_state

    def load_state_dict(self, state: Any) -> None:
        """Is never called: an iterator of `--dataloader-save` has no way back, and is only saved."""
        raise NotImplementedError("an iterator of --dataloader-save cannot be restored")


LOOP = LoopDataLoader()
_is_ours = False  # whether the running save_checkpoint writes a checkpoint of ours


def _place() -> tuple[int, int, bool]:
    """Returns this rank's data-parallel rank, their number, and whether it is the one that stores."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        is_distributed = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size(), True) if is_distributed else (0, 1, True)
    stores = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_pipeline_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size(), stores


@contextlib.contextmanager
def saving(is_ours: bool) -> Iterator[None]:
    """Marks a `save_checkpoint` of Megatron's, which may also be one of its own format."""
    global _is_ours
    before, _is_ours = _is_ours, is_ours
    try:
        yield
    finally:
        _is_ours = before


def wrap_maybe_save_dataloader_state(
    original: Callable[..., Any],
    train_iterator: Any,
    iteration: int,
    dataloader_save_path: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps `maybe_save_dataloader_state`: in a save of ours the position joins the checkpoint."""
    if not _is_ours:
        return original(train_iterator, iteration, dataloader_save_path, *args, **kwargs)
    if dataloader_save_path:
        LOOP.note_iterator(train_iterator)
    return None
