"""Prepared saves: in Megatron's training loop, a save reuses what the last one has prepared, if it holds.

Nearly all of a save's time on the trainer's path goes into describing the same tensors again: the sharded
state dicts of model and optimizer, factories, validation, mapping, classification. In a prepared save,
Megatron makes a *thin* state dict, in which the model and the optimizer have no tensors; values of plain
objects are made by Megatron as in any save. Then we only look at what can differ (survey.py).
The tensors are those of the survey, under the names and in the places that the last full save gave them.

Belongs here: what a full save notes (Preparation), and one prepared save (ThinSave). Does not belong here:
which saves are prepared (preparing.py).

All ranks prepare, or none, if in a full save they exchange metadata. Any change, anything that cannot be
proved and any tensor that was made for one save alone (a gathered optimizer state, a dequantized weight) mean
a full save. A thin state dict that any other code tried to save would fail: it holds what cannot be pickled.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from megatron_datastates.engine.exchange import Described, facts_of
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.errors import SaveFailedError
from megatron_datastates.mcore import fences
from megatron_datastates.mcore.save.attributes import UnprovableError
from megatron_datastates.mcore.save.extra_states import ExtraStates, extra_states
from megatron_datastates.mcore.save.marks import MARK, Mark
from megatron_datastates.mcore.save.mutability import Classify
from megatron_datastates.mcore.save.rows import Rows, row_of, with_tensors
from megatron_datastates.mcore.save.survey import (
    Found,
    Survey,
    has_buckets,
    is_megatrons_alone,
    optimizers_in,
    require_known_maker,
)
from megatron_datastates.pipeline.saving.plans import has_unresolved_views
from megatron_datastates.providers.base import Tensors

# Arguments of Megatron that decide what is stored by which rank.
_ARGUMENTS = (
    "ckpt_format",
    "no_save_optim",
    "use_distributed_optimizer",
    "ckpt_fully_parallel_save",
    "ckpt_fully_parallel_save_process_group",
)


class Preparation:
    """What one save has prepared for the next ones with the same model and optimizer.

    Args:
        call: the arguments of `generate_state_dict`.

    Raises:
        UnprovableError: nothing can be prepared for this model and this optimizer.
    """

    def __init__(self, call: Mapping[str, Any]) -> None:
        require_known_maker()
        self._conditions = _conditions(call)
        self.rank, _ = self._conditions[-1]
        self.survey = Survey(call["model"], call["optimizer"])
        # Of the full save, and of prepared ones after it:
        self.bucket_states: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self.states: set[int] = set()  # ids of the other optimizers
        self._padding: list[torch.Tensor] = []  # zeros, which nobody changes
        self._made: set[int] = set()  # ids of what the tensors of the full state dict are, or are views of
        self.extra_states: list[ExtraStates] = []  # by model chunk
        self.empty: dict[str, None] = {}  # keys of objects without a value
        self._rows: Rows | None = None  # of what was stored
        self._classified: Any = None  # what the mutability depends on
        self.is_complete = False

    def note_buckets(self, optimizer: Any, state: dict[Any, Any], padding: list[torch.Tensor]) -> None:
        """Notes the objects that a distributed optimizer stores beside its buckets, and their padding."""
        objects = {key: copy.copy(item) for key, item in state.items() if isinstance(item, ShardedObject)}
        self.bucket_states[optimizer] = objects
        self._padding += padding

    def note_models(self, call: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Adds marks to the state dicts of the model chunks.

        Raises:
            UnprovableError: one has values that cannot be proved to be unchanged.
        """
        optimizers = optimizers_in(call["optimizer"])
        if any(one not in self.bucket_states for one in optimizers if has_buckets(one)):
            raise UnprovableError("the optimizer's state is not stored in buckets")
        self.states = {id(one) for one in optimizers if not has_buckets(one)}
        if self.states and "optimizer" not in state:
            raise UnprovableError("the optimizer's state is not stored")
        chunks = _chunks_of(state, len(call["model"]))
        self.extra_states = [extra_states(*pair) for pair in zip(call["model"], chunks, strict=True)]
        for number, chunk in enumerate(chunks):
            chunk[MARK] = Mark.of(number, self.rank, preparation=self)
        self._made = _viewed(state)

    def complete(self, state: Mapping[str, Any], found: Tensors, stored: list[torch.Tensor]) -> None:
        """Notes what a full save has stored.

        Args:
            state: the state dict, as it came to the strategy.
            stored: the tensors as they were in it, those that this rank stores.

        Raises:
            UnprovableError: a tensor is none that the model or the optimizer holds, or one was left out: the
                next save may have it.
        """
        if not self._made <= _viewed(state):
            raise UnprovableError("a program has left out tensors of the state dict that Megatron has made")
        numbers = dict(self.survey.numbers)
        first = len(numbers)
        numbers.update((id(tensor), first + at) for at, tensor in enumerate(self._padding))
        rows = []
        for key, tensor, passed in zip(found.keys, stored, found.tensors, strict=True):
            if tensor is not passed:
                raise UnprovableError(f"{key!r} is quantized")
            rows.append(row_of(key, tensor, numbers))
        facts = facts_of(found.tensors)
        if has_unresolved_views(found.tensors, facts):
            raise UnprovableError("a tensor is a negated or conjugated view")
        self._rows = Rows(rows, facts, with_tensors(found, []), self._padding)
        self._classified = None
        self.is_complete = True

    def note_empty(self, found: tuple[str, ...]) -> None:
        """Notes the keys of all objects of a full save that have no value.

        Most objects of a model are extra states without a value, and as long as they have none, Megatron need
        not see them again.
        """
        self.empty = dict.fromkeys(found)

    def begin(self, call: Mapping[str, Any], *, leaves_out: bool) -> ThinSave:
        """Begins a prepared save: checks whether it may be one, before Megatron makes a thin state dict.

        Args:
            leaves_out: as in ThinSave.

        Raises:
            UnprovableError: its arguments are others, or the last save did not end.
        """
        if not self.is_complete:
            raise UnprovableError("the last full save did not complete its preparation")
        require_known_maker()
        if _conditions(call) != self._conditions:
            raise UnprovableError("the arguments of the save have changed")
        return ThinSave(self, leaves_out=leaves_out)

    def stored(self, found: Found, classifier: Callable[[], Classify], *, is_lazy: bool) -> Tensors:
        """Returns the tensors of a prepared save, from those of the survey.

        Args:
            classifier, is_lazy: as in ShardedStateProvider.
        """
        rows = self._rows
        assert rows is not None
        tensors, described = rows.bases(found.tensors), rows.described(found.described)
        depends_on = self._classification(is_lazy, described)
        if depends_on is None or depends_on != self._classified:
            # By what is viewed: a view that is made here does not show that its base is a Parameter.
            rows.columns.mutability = list(map(classifier(), tensors))
            self._classified = depends_on
        rows.make_views(tensors)
        return with_tensors(rows.columns, tensors, described)

    def _classification(self, is_lazy: bool, described: Described | None) -> Any:
        """Returns all that mutabilities depend on, or None if that is unknown."""
        stepped = fences.stepped_optimizers()
        if described is None or not stepped <= self.survey.inner_optimizers():
            return None  # another optimizer may own some of the memory
        return is_lazy, stepped, described.addresses.tobytes()


class ThinSave:
    """One prepared save, from the thin state dict that Megatron makes to the tensors that are stored.

    Args:
        preparation: by which it is prepared.
        leaves_out: whether objects without a value may be missing: Megatron does not look for them.
    """

    def __init__(self, preparation: Preparation, *, leaves_out: bool) -> None:
        self._preparation = preparation
        self._leaves_out = leaves_out
        self._used: set[int] = set()  # what Megatron has asked for: numbers of chunks, ids of optimizers
        self._left_out: set[str] = set()  # keys of objects in no state dict
        self._current: Found | None = None  # the tensors of the survey
        self._frees: int | None = None  # calls that had freed memory by then
        self.is_taken = False  # its tensors went to a strategy

    def models(self) -> list[Any]:
        """Returns what stands in for the model chunks while Megatron makes a thin state dict."""
        chunks = (functools.partial(self._chunk, at) for at in range(len(self._preparation.extra_states)))
        return [types.SimpleNamespace(sharded_state_dict=chunk) for chunk in chunks]

    def buckets(self, optimizer: Any) -> dict[Any, Any]:
        """Returns a distributed optimizer's bucket state without tensors.

        Raises:
            UnprovableError: this is another optimizer.
        """
        objects = self._preparation.bucket_states.get(optimizer)
        if objects is None:
            raise UnprovableError("an optimizer was added or replaced")
        self._used.add(id(optimizer))
        return {key: copy.copy(item) for key, item in objects.items()}

    def note_asked(self, optimizer: Any) -> None:
        """Notes that Megatron asks for the state of an optimizer without buckets."""
        self._used.add(id(optimizer))

    def require_used(self) -> None:
        """Raises UnprovableError if Megatron did not ask for all of the thin state."""
        prepared = self._preparation
        chunks = set(range(len(prepared.extra_states)))
        optimizers = prepared.states.union(map(id, prepared.bucket_states))
        if self._used != chunks | optimizers:
            raise UnprovableError(
                f"Megatron did not ask for the state of all {len(chunks)} model chunks and "
                f"{len(optimizers)} optimizers"
            )

    def require_unchanged(self, call: Mapping[str, Any]) -> None:
        """Checks whether all is as it was, and holds the tensors for `tensors` if so.

        After Megatron has made the thin state dict: code of others that it calls may have changed something.

        Raises:
            UnprovableError: something has changed.
        """
        self._frees = FENCE.frees
        self._current = self._preparation.survey.tensors_if_unchanged(call["optimizer"])

    def _chunk(self, number: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns a model chunk's state without tensors. Notes that Megatron has asked for it.

        Raises:
            UnprovableError: a value that was made and not stored may be one to be stored.
        """
        self._used.add(number)
        state: dict[str, Any] = {MARK: Mark.of(number, self._preparation.rank, thin=self)}
        extras = self._preparation.extra_states[number]
        extras.require_dropped()
        asked = extras.all
        if extras.are_still_empty() and self._leave_out(extras.empty_keys):
            asked = extras.others
        for extra in asked:
            value = extra.value_of()
            if value is None and self._leave_out(extra.keys):
                continue
            state[extra.name] = item = copy.copy(extra.template)
            item.data = value
        return state

    def _leave_out(self, keys: frozenset[str]) -> bool:
        """Returns whether Megatron need not see objects without a value, which are stored anyway."""
        if not self._leaves_out or not keys <= self._preparation.empty.keys():
            return False
        self._left_out |= keys
        return True

    def tensors(self, classifier: Callable[[], Classify], *, is_lazy: bool) -> Tensors:
        """Returns the tensors of this save.

        Args:
            classifier, is_lazy: as in ShardedStateProvider.

        Raises:
            SaveFailedError: one has changed since the survey.
        """
        found = self._preparation.stored(self._found_again(), classifier, is_lazy=is_lazy)
        self.is_taken = True
        return found

    def _found_again(self) -> Found:
        """Returns the tensors of the survey; looks again where they are if that may have changed since.

        It may if other code is on the stack, or if memory was freed. What other code has moved before it
        returned is stored as it was.

        Raises:
            SaveFailedError: one has changed.
        """
        assert self._current is not None
        if is_megatrons_alone() and FENCE.frees == self._frees:
            return self._current
        try:
            return self._preparation.survey.found_again(self._current)
        except UnprovableError as error:
            message = f"{error}, while Megatron made a state dict; use --datastates-prepared off"
            raise SaveFailedError(message) from error

    def empty_objects(self, found: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the keys of all objects of the save that have no value, also those that were left out.

        Args:
            found: those in the thin state dict.
        """
        known, all_found = self._preparation.empty, self._left_out.union(found)
        kept = tuple([key for key in known if key in all_found])  # in the order of the full save
        return kept + tuple([key for key in found if key not in known])

    def release(self) -> None:
        """Lets go of the tensors of a prepared save. If it did not take them, the next save is full."""
        self._current = None
        self._preparation.is_complete = self._preparation.is_complete and self.is_taken


def _conditions(call: Mapping[str, Any]) -> Any:
    """Returns what must be equal in two saves for one to be prepared by the other."""
    metadata = [call.get(name) for name in ("model_sd_kwargs", "optim_sd_kwargs")]
    world = torch.distributed.group.WORLD
    return (
        [id(chunk) for chunk in call["model"]],
        id(call["optimizer"]),
        [getattr(call["args"], name, None) for name in _ARGUMENTS],
        [_plain(one) for one in metadata],
        id(world),
        (world.rank(), world.size()) if world is not None else (0, 1),
    )


def _plain(value: Any) -> Any:
    """Returns a value with the ids of what is not plain, such as process groups, which are not to be held."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else id(value)


def _viewed(state: Mapping[str, Any]) -> set[int]:
    """Returns the ids of the tensors that those of a sharded state dict are, or are views of."""
    kinds = ShardedTensor, ShardedTensorFactory
    found = (item.data for item in nested_values(state) if isinstance(item, kinds))
    return {id(one if one._base is None else one._base) for one in found if one is not None}


def _chunks_of(state: dict[str, Any], count: int) -> list[dict[str, Any]]:
    keys = ["model"] if count == 1 else [f"model{number}" for number in range(count)]
    if not all(isinstance(state.get(key), dict) and state[key] for key in keys):
        raise UnprovableError("the model has no sharded state dict where it is expected")
    return [state[key] for key in keys]
