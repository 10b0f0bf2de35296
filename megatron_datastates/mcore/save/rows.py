"""The tensors that a full save has stored, one row each, and where the next saves find each of them.

Belongs here: the way from the tensors of a model and its optimizers to those that are stored, which may be
views of them. Does not belong here: proving that they are still the same (survey.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.engine.exchange import Described, Facts, describe
from megatron_datastates.format.tables import Words
from megatron_datastates.mcore.save.attributes import UnprovableError
from megatron_datastates.mcore.save.survey import items_at
from megatron_datastates.providers.base import Tensors

View = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset in elements


class Row(NamedTuple):
    """Where a stored tensor is found at every save."""

    number: int  # of the tensor that it is, or is a view of
    view: View | None
    offset: int = 0  # in bytes, from that tensor's first element


class _Places(NamedTuple):
    """Of all rows: element i of each array is about stored tensor i."""

    pick: Callable[[list[Any]], Iterable[Any]]  # of each surveyed tensor's item, that of each row's tensor
    numbers: npt.NDArray[np.intp]
    offsets: Words
    views: list[tuple[int, View]]  # with the row's position


class Rows:
    """All stored tensors of a rank, in the order of the save.

    Args:
        facts: of the tensors as they were stored.
        columns: what is stored of them beside their values; without the tensors.
        padding: zeros, which nobody changes; they are numbered after the surveyed tensors.
    """

    def __init__(
        self, rows: list[Row], facts: Facts | None, columns: Tensors, padding: list[torch.Tensor]
    ) -> None:
        self.columns = columns
        self._rows, self._facts, self._padding = rows, facts, padding

    def bases(self, surveyed: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns for each row the tensor that it is, or is a view of."""
        return list(self._places.pick([*surveyed, *self._padding]))

    def make_views(self, tensors: list[torch.Tensor]) -> None:
        """Replaces those of `bases` that are stored as views by the views."""
        for at, view in self._places.views:
            tensors[at] = view_of(tensors[at], view)

    def described(self, surveyed: Described | None) -> Described | None:
        """Returns where the stored tensors are, from where those of the survey are."""
        padding, places = self._padding_described, self._places
        if surveyed is None or padding is None or self._facts is None:
            return None
        addresses = np.concatenate([surveyed.addresses, padding.addresses])[places.numbers]
        storages = list(places.pick(surveyed.storages + padding.storages))
        return Described(self._facts, addresses + places.offsets, storages)

    @functools.cached_property
    def _padding_described(self) -> Described | None:
        """Where the padding is: nobody else has it, so it stays there."""
        return describe(self._padding)

    @functools.cached_property
    def _places(self) -> _Places:
        """The rows, in columns."""
        return _Places(
            pick=items_at([row.number for row in self._rows]),
            numbers=np.array([row.number for row in self._rows], np.intp),
            offsets=np.array([row.offset for row in self._rows], np.int64).view(np.uint64),
            views=[(at, row.view) for at, row in enumerate(self._rows) if row.view is not None],
        )


def row_of(key: str, tensor: torch.Tensor, numbers: dict[int, int]) -> Row:
    """Returns where a stored tensor is found.

    Args:
        numbers: of the tensors that stay, by id.

    Raises:
        UnprovableError: it is none of them, and no view of one.
    """
    number = numbers.get(id(tensor))
    if number is not None:
        return Row(number, None)
    base = tensor._base
    if base is None or id(base) not in numbers or base.dtype != tensor.dtype:
        raise UnprovableError(f"the tensor {key!r} is made anew in every save")
    offset = int(tensor.storage_offset()) - int(base.storage_offset())
    view = (tuple(tensor.shape), tensor.stride(), offset)
    return Row(numbers[id(base)], view, offset * tensor.element_size())


def view_of(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """Returns a view of a tensor, in the memory that it has now."""
    shape, strides, offset = view
    return tensor.detach().as_strided(shape, strides, tensor.storage_offset() + offset)


def with_tensors(
    columns: Tensors, tensors: list[torch.Tensor], described: Described | None = None
) -> Tensors:
    """Returns other tensors with the columns in lists of their own: a transformation may change them."""
    keys, mutability = list(columns.keys), list(columns.mutability)
    return Tensors(keys, tensors, mutability, list(columns.places), list(columns.stable), described)
