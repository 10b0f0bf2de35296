"""Finds the entry of a state that no plan can be made for, once an exception has shown that there is one.

Planning looks at all entries at once, and leaves checks to torch and Python, since every save would wait for
them. Their errors name no key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_datastates.errors import DataStatesError, MismatchError
from megatron_datastates.pipeline.saving.plans import Plans, tail_items
from megatron_datastates.providers.base import Tensors, TensorSource
from megatron_datastates.providers.collect import Collected, Part


def with_key(error: Exception, state: Collected) -> Exception:
    """Returns the error of planning a state with the key of the first entry that cannot be planned alone."""
    if isinstance(error, DataStatesError | MemoryError):
        return error
    sources = list(state.tensors.sources())
    found = _first(len(sources), lambda begin, end: _find(sources[begin:end], Collected()))
    if found is not None:
        number, cause = found
        part = next(p for p in state.parts if p.first_tensor <= number < p.end_tensor)
        return _named(f"tensor {sources[number].key!r}", cause, sources[number].key, part)
    keys, tail = state.tail_keys, state.tail
    found = _first(
        len(tail), lambda begin, end: _find([], Collected(tail=tail[begin:end], tail_keys=keys[begin:end]))
    )
    if found is not None:
        number, cause = found
        part = next(p for p in state.parts if p.first_tail <= number < p.end_tail)
        return _named(f"the entry {keys[number]!r}", cause, keys[number], part)
    return error


def _find(sources: Sequence[TensorSource], state: Collected) -> None:
    """Plans these entries."""
    tensors = Tensors()
    for source in sources:
        tensors.add(*source)
    Plans(1).find(tensors, tail_items(state))


def _first(count: int, plan: Callable[[int, int], None]) -> tuple[int, Exception] | None:
    """Returns the number and the error of the first of `count` entries that cannot be planned, by halves."""
    begin, end, cause = 0, count, _error_of(plan, 0, count)
    if cause is None:
        return None
    while end - begin > 1:
        middle = (begin + end) // 2
        if (earlier := _error_of(plan, begin, middle)) is not None:
            end, cause = middle, earlier
        else:
            begin = middle
    return begin, _error_of(plan, begin, end) or cause


def _error_of(plan: Callable[[int, int], None], begin: int, end: int) -> Exception | None:
    try:
        plan(begin, end)
    except Exception as error:
        return error
    return None


def _named(what: str, cause: Exception, key: object, part: Part) -> Exception:
    if not isinstance(key, str):
        text = f"a key is {key!r} of type {type(key).__name__}: expected str; rename it"
    elif isinstance(cause, UnicodeEncodeError):
        text = f"the key {key!r} has characters that UTF-8 does not have: rename it"
    else:
        text = (
            f"{what} cannot be saved: {type(cause).__name__}: {cause}. Expected a strided torch.Tensor on "
            "the host or on a CUDA device, or a source of megatron_datastates.providers"
        )
    return part.failed(MismatchError(text))
