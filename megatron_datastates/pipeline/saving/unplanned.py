"""Finds the entry of a state that no plan can be made for, once an exception has shown that there is one.

Planning looks at all entries at once, and leaves checks to torch and Python, since every save would wait for
them. Their errors name no key.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_datastates.errors import DataStatesError, MismatchError
from megatron_datastates.pipeline.saving.plans import Plans, tail_items
from megatron_datastates.providers.base import Tensors, TensorSource
from megatron_datastates.providers.collect import Collected, ProviderEntries


def with_key(error: Exception, state: Collected) -> Exception:
    """Returns the error of planning a state with the key of the first entry that cannot be planned alone."""
    if isinstance(error, DataStatesError | MemoryError):
        return error
    for number, source in enumerate(state.tensors.sources()):
        cause = _error_of([source], Collected())
        if cause is not None:
            provider = next(p for p in state.by_provider if p.first_tensor <= number < p.end_tensor)
            return _named(f"tensor {source.key!r}", cause, source.key, provider)
    for number, (key, entry) in enumerate(zip(state.tail_keys, state.tail, strict=True)):
        cause = _error_of([], Collected(tail=[entry], tail_keys=[key]))
        if cause is not None:
            provider = next(p for p in state.by_provider if p.first_tail <= number < p.end_tail)
            return _named(f"the entry {key!r}", cause, key, provider)
    return error


def _error_of(sources: Sequence[TensorSource], state: Collected) -> Exception | None:
    """Returns the error of planning these entries alone."""
    tensors = Tensors()
    for source in sources:
        tensors.add(*source)
    try:
        Plans(1).find(tensors, tail_items(state))
    except Exception as error:
        return error
    return None


def _named(what: str, cause: Exception, key: object, provider: ProviderEntries) -> Exception:
    if not isinstance(key, str):
        text = f"a key is {key!r} of type {type(key).__name__}: expected str; rename it"
    elif isinstance(cause, UnicodeEncodeError):
        text = f"the key {key!r} has characters that UTF-8 does not have: rename it"
    else:
        text = (
            f"{what} cannot be saved: {type(cause).__name__}: {cause}. Expected a strided torch.Tensor on "
            "the host or on a CUDA device, or a source of megatron_datastates.providers"
        )
    return provider.failed(MismatchError(text))
