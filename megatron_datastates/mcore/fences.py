"""Fences: waits before memory that a save may still be reading is changed or freed.

Memory is freed where a storage is resized (`tensor.untyped_storage().resize_(0)`) or moved to shared memory,
and where memory savers unmap it. Only calls from Python are seen: not `tensor.resize_` beyond the storage,
and not `torch.ops.inductor.resize_storage_bytes_`, which compiled FSDP calls. Assigning other memory to a
tensor (`tensor.data = ...`, `tensor.set_`) needs no fence: saves keep storages alive, not tensors.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.fence import fence as fence  # part of this package's interface

# Optimizers whose pre-step hook has fired: their memory is known to change only after a fence.
_stepped: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = False
_lock = threading.RLock()  # of that; a signal handler may save in the middle
_FREEING_METHODS = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")


def install() -> None:
    """Adds a fence to every optimizer step and every storage of this process. Idempotent, thread-safe."""
    global _installed
    with _lock:
        if _installed:
            return
        register_optimizer_step_pre_hook(_before_step)
        for name in _FREEING_METHODS:
            setattr(torch.UntypedStorage, name, _unread_before(getattr(torch.UntypedStorage, name)))
        FENCE.frees = 0
        _installed = True


def _unread_before(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a storage's method that frees its memory. Costs 0.1 us while no save is copying."""

    @functools.wraps(original)
    def unread_before(self: Any, *args: Any, **kwargs: Any) -> Any:
        FENCE.note_free()
        if FENCE.readers:
            FENCE.wait_until_unread(self._cdata)
        return original(self, *args, **kwargs)

    return unread_before


def wrap_unmap(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps a function that unmaps device memory; which tensors lie in it is unknown, so it waits for all."""
    FENCE.note_free()
    FENCE.wait_until_unread()
    return original(*args, **kwargs)


def wrap_optimizer_step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `step` of Megatron's own optimizers: checks that torch's pre-step hook fired, then fences.

    If a step succeeded without a fence before it, the hook did not fire: a save that was reading then fails
    rather than being published torn. The fence at the end also covers a skipped step, and one without
    parameters on this rank: clip_qk rewrites weights after it.
    """
    result = original(self, *args, **kwargs)
    if result[0] and not getattr(self, "is_stub_optimizer", False):
        FENCE.witness_mutation(f"{type(self).__name__} stepped without its inner optimizer's fence")
    FENCE.wait("the end of the optimizer step")
    return result


def _wrap_fenced(reason: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps a function that changes or frees memory itself: fences before each call."""
    if not _is_capturing():
        FENCE.wait(reason)
    return original(*args, **kwargs)


# Resizes storages to zero bytes, or refills them.
wrap_offload = functools.partial(_wrap_fenced, "offloading")
# A replayed graph runs no hooks.
wrap_graph_replay = functools.partial(_wrap_fenced, "the optimizer's CUDA graph")
# Into ranks whose own optimizer may be empty.
wrap_gather = functools.partial(_wrap_fenced, "the gathering of parameters")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _is_capturing():
        return
    FENCE.wait("the optimizer step")
    _stepped.add(optimizer)


def _is_capturing() -> bool:
    """Returns whether the current stream records a CUDA graph.

    What is recorded runs later, without hooks: its replay is fenced elsewhere. A fence would make the
    recording stream wait for an event from outside the graph, which ends the recording with an error.
    """
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def stepped_optimizers() -> set[int]:
    """Returns the ids of the optimizers that have stepped."""
    return {id(optimizer) for optimizer in _stepped}


def stepped_storages() -> set[int]:
    """Returns the storage addresses of the parameters and the state of every optimizer that has stepped."""
    found: set[int] = set()
    for optimizer in list(_stepped):
        for group in optimizer.param_groups:
            found.update(_address(param) for param in group["params"])
        for state in optimizer.state.values():
            if isinstance(state, dict):
                found.update(_address(value) for value in state.values() if isinstance(value, torch.Tensor))
    found.discard(0)
    return found


def stepped_bytes() -> int:
    """Returns about how many bytes of tensors this rank stores: what the optimizers that have stepped hold.

    That is their parameters, which a distributed optimizer has shards of, and their states. For each element
    of a parameter of 4 bytes, 2 more are those of the model's own weights.
    """
    parameters: dict[int, torch.Tensor] = {}  # by id: one optimizer may consist of others
    states: dict[int, torch.Tensor] = {}
    for optimizer in list(_stepped):
        for group in optimizer.param_groups:
            parameters.update((id(one), _local(one)) for one in group["params"])
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, dict) else ()
            states.update((id(one), _local(one)) for one in values if isinstance(one, torch.Tensor))
    weights = sum(2 * one.numel() for one in parameters.values() if one.element_size() == 4)
    stored = (one for one in (parameters | states).values() if one.layout is torch.strided)
    return weights + sum(one.nbytes for one in stored)


def sharded_storages(model: Iterable[torch.nn.Module]) -> set[int]:
    """Returns the storage addresses of Parameters that are DTensors, as FSDP2's, of these model chunks.

    State dicts have their local tensors, which are no Parameters. Only the first Parameter of a chunk is
    asked whether it is a DTensor: FSDP2 makes all of them DTensors, or none.
    """
    found: set[int] = set()
    for chunk in model:
        if hasattr(next(chunk.parameters(), None), "_local_tensor"):
            found.update(map(_address, chunk.parameters()))
    found.discard(0)
    return found


def _address(tensor: torch.Tensor) -> int:
    try:
        return _local(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # another wrapper without memory: not proved to be lazy
        return 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
    return found
