"""The part of prepared saves that Megatron calls: which saves are prepared, and what its functions return."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_datastates.mcore.hooks.calls import parameters_of
from megatron_datastates.mcore.save.attributes import UnprovableError
from megatron_datastates.mcore.save.buckets import attach_map, zero_padding
from megatron_datastates.mcore.save.prepared import Preparation, ThinSave
from megatron_datastates.mcore.save.survey import gathers, optimizers_in
from megatron_datastates.mcore.save.thin_groups import groups_alone
from megatron_datastates.mcore.save.thin_states import states_left_out
from megatron_datastates.pipeline.publishing.collectives import ranks_of, sum_now
from megatron_datastates.pipeline.saving.held import trainer_held
from megatron_datastates.providers.base import Tensors

logger = logging.getLogger(__name__)


class _Saving:
    """One call of `save_checkpoint` whose state goes to our strategy."""

    def __init__(self, *, is_on: bool, is_constant: bool) -> None:
        self.is_on, self.is_constant = is_on, is_constant
        self.model: list[Any] = []  # its chunks
        self.full: Preparation | None = None  # notes what this full save prepares
        self.thin: ThinSave | None = None  # if this save is, or was about to be, prepared
        self.obstacle = ""  # why this save is not prepared, or why the next one will not be


_saving: _Saving | None = None  # used by the trainer's thread only
_preparations: weakref.WeakKeyDictionary[Any, Preparation] = weakref.WeakKeyDictionary()  # by first chunk
_reasons: set[str] = set()  # logged already


@contextlib.contextmanager
def saving(*, is_ours: bool, is_on: bool, is_constant: bool) -> Iterator[None]:
    """Wraps a `save_checkpoint`. With `is_on`, it may be prepared.

    Args:
        is_ours: its state goes to our strategy. Must be the same on all ranks, unlike `is_on`.
        is_constant: a full save makes no collective calls either, so that ranks need not agree. Must be the
            same on all ranks, too.
    """
    global _saving
    before, _saving = _saving, _Saving(is_on=is_on, is_constant=is_constant) if is_ours else None
    try:
        yield
    finally:
        if _saving is not None and _saving.thin is not None:
            _saving.thin.release()
        _saving = before


def wrap_generate_state_dict(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `generate_state_dict`: returns a thin state dict if this save is prepared."""
    if _saving is None:
        return original(*args, **kwargs)
    with trainer_held("state_dict"):
        parameters = parameters_of(original)
        call = parameters.of_call(args, kwargs)
        _saving.model = call["model"]

        def generate(models: list[Any]) -> Any:
            others, named = parameters.replaced(args, kwargs, "model", models)
            return original(*others, **named)

        must_agree = gathers(call["optimizer"])
        thin = _generate_thin(generate, call, _saving, must_agree=must_agree)
        if _all_ranks(thin is not None, must_agree or not _saving.is_constant):
            return thin
        if thin is not None:
            _saving.obstacle = "another rank makes its state anew"
        if _saving.thin is not None:
            _saving.thin.release()
            _saving.thin = None
        return _generate_full(generate, call, _saving)


def _generate_thin(
    generate: Callable[[list[Any]], Any], call: dict[str, Any], saving: _Saving, *, must_agree: bool
) -> Any:
    """Returns a thin state dict if this rank is prepared, else None.

    Args:
        must_agree: the optimizer makes collective calls when it is asked for its state: then all ranks ask,
            or none. From there on, nothing of ours fails that could have been found out before.

    Raises:
        Exception: Megatron's code failed while it made such calls. Others wait in them, as in a full save:
            a sum that asks for one would not be what they wait for.
    """
    preparation = _preparations.get(call["model"][0]) if call["model"] and saving.is_on else None
    has_asked = False

    def note_asked(optimizer: Any) -> None:
        nonlocal has_asked
        if not has_asked:
            has_asked = True
            if not _all_ranks(True, must_agree):
                raise UnprovableError("another rank makes its state anew")
        if saving.thin is not None:
            saving.thin.note_asked(optimizer)

    thin = None
    if preparation is not None:
        with _noting(unless=lambda: must_agree and has_asked):
            saving.thin = begun = preparation.begin(call, leaves_out=saving.is_constant)
            optimizers = optimizers_in(call["optimizer"])
            with groups_alone(optimizers), states_left_out(optimizers, note_asked):
                state = generate(begun.models())
            begun.require_used()
            begun.require_unchanged(call)
            thin = state
    if not has_asked:
        _all_ranks(False, must_agree)
    return thin


def _all_ranks(is_ready: bool, must_agree: bool) -> bool:
    """Returns whether this rank and, if ranks must agree, all others are ready.

    They must if a full save makes collective calls: all ranks make them, or none. Looks are collective only
    then: no other save but the first waits for other ranks.
    """
    unready = [int(not is_ready)]
    if must_agree and len(ranks_of()) > 1:
        unready = sum_now(unready)
    return not unready[0]


def _generate_full(generate: Callable[[list[Any]], Any], call: dict[str, Any], saving: _Saving) -> Any:
    if call["model"]:
        _preparations.pop(call["model"][0], None)
    if saving.is_on:
        with _noting():
            saving.full = Preparation(call)
    state = generate(call["model"])
    if saving.full is not None:
        with _noting():
            saving.full.note_models(call, state)
            _preparations[call["model"][0]] = saving.full
    return state


def wrap_sharded_param_state_dp_reshardable(
    original: Callable[..., Any],
    self: Any,
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    metadata: Any = None,
    **kwargs: Any,
) -> Any:
    """Wraps `DistributedOptimizer.sharded_param_state_dp_reshardable`: adds the map, and zeroes padding.

    In a prepared save, objects without tensors are all that is returned.
    """
    saving = None if is_loading else _saving
    if saving is not None and saving.thin is not None:
        return saving.thin.buckets(self)
    state = original(self, model_sharded_state_dict, is_loading, metadata, **kwargs)
    padding = zero_padding(state)
    if not is_loading:
        attach_map(self, state, model_sharded_state_dict, metadata)
    if saving is not None and saving.full is not None:
        saving.full.note_buckets(self, state, padding)
    return state


def saved_model() -> list[Any]:
    """Returns the chunks of the model that `save_checkpoint` is saving, if that is known."""
    return _saving.model if _saving is not None else []


def awaits_tensors() -> bool:
    """Returns whether a prepared save has not yet taken its tensors."""
    return _saving is not None and _saving.thin is not None and not _saving.thin.is_taken


def complete(
    preparation: Preparation, state: dict[str, Any], found: Tensors, stored: list[torch.Tensor]
) -> None:
    """Notes what a full save has stored, so that the next one may be prepared."""
    with _noting():
        preparation.complete(state, found, stored)


def obstacle() -> str:
    """Returns why the current save is not prepared, or why the next one will not be; "" if none is known."""
    return _saving.obstacle if _saving is not None else ""


@contextlib.contextmanager
def _noting(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Logs why something cannot be prepared, each reason once, and notes it for the report.

    No error in here may end a training: a full save needs nothing of this.

    Args:
        unless: whether errors that are not ours are raised all the same.
    """
    try:
        yield
    except Exception as error:
        is_known = isinstance(error, UnprovableError)
        if not is_known and unless():
            raise
        reason = str(error) if is_known else f"{type(error).__name__}: {error}"
        if _saving is not None:
            _saving.obstacle = reason
        if reason not in _reasons:
            _reasons.add(reason)
            level = logging.INFO if is_known else logging.WARNING
            logger.log(
                level,
                "this save could not reuse the previous save's preparation: %s (--datastates-prepared)",
                reason,
            )
