"""Who fences: every place where memory that a save may still be reading is about to change or to go.

Memory goes where a storage is resized (`tensor.untyped_storage().resize_(0)`) or moved to shared memory, and
where memory savers unmap it. Only what comes through Python is seen: not `tensor.resize_` beyond the storage,
nor `torch.ops.inductor.resize_storage_bytes_`, which compiled FSDP calls. A tensor that is given other memory
(`tensor.data = ...`, `tensor.set_`) needs no fence: saves keep storages, not tensors.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_datastates.engine.fence import FENCE

# Optimizers whose pre-step hook has fired: their memory is known to change behind a fence only.
_stepped: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = False
_GIVING_UP = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")


def fence(reason: str = "an explicit fence") -> None:
    """Returns when everything that saves were reading may change, be freed, or be unmapped.

    Callers that do so otherwise than by an optimizer's step call it before (see
    `DataStatesSaveStrategy(assume_immutable=True)`).
    """
    FENCE.wait(reason)
    FENCE.wait_until_unread()


def install() -> None:
    """Fences every optimizer step of this process, and all storages. Idempotent."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        for name in _GIVING_UP:
            setattr(torch.UntypedStorage, name, _unread_before(getattr(torch.UntypedStorage, name)))
        _installed = True


def _unread_before(original: Callable[..., Any]) -> Callable[..., Any]:
    """For methods of a storage that give its memory up. A tenth of a microsecond while no save copies."""

    @functools.wraps(original)
    def unread_before(self: Any, *args: Any, **kwargs: Any) -> Any:
        if FENCE.readers:
            FENCE.wait_until_unread(self._cdata)
        return original(self, *args, **kwargs)

    return unread_before


def wrap_unmap(original: Callable[..., Any]) -> Callable[..., Any]:
    """For what unmaps device memory, nobody knows of which tensors."""

    def unmap(*args: Any, **kwargs: Any) -> Any:
        FENCE.wait_until_unread()
        return original(*args, **kwargs)

    return unmap


def wrap_optimizer_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `step` of Megatron's own optimizers, at whose end no hook of torch can be missing.

    If a step succeeded and no fence came before it, the hook did not fire: such a save fails rather than
    being published torn. After a skipped step, and one without parameters of this rank, it is one more
    fence: clip_qk rewrites weights there.
    """

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if result[0] and not getattr(self, "is_stub_optimizer", False):
            FENCE.witness_mutation(f"{type(self).__name__} stepped without its inner optimizer's fence")
        FENCE.wait("the end of the optimizer step")
        return result

    return step


def _fenced(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What changes the memory of parameters or of optimizers by itself: fenced whenever it is called."""

    def maker(original: Callable[..., Any]) -> Callable[..., Any]:
        def fenced(*args: Any, **kwargs: Any) -> Any:
            FENCE.wait(reason)
            return original(*args, **kwargs)

        return fenced

    return maker


wrap_offload = _fenced("offloading")  # resizes storages to nothing, or refills them
wrap_graph_replay = _fenced("the optimizer's CUDA graph")  # a replayed graph runs no hooks
wrap_gather = _fenced("the gathering of parameters")  # into ranks whose own optimizer may be empty


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # a captured step runs later, without hooks; its replay is fenced elsewhere
    FENCE.wait("the optimizer step")
    _stepped.add(optimizer)


def stepped_storages() -> set[int]:
    """Storage addresses of the parameters and the state of every optimizer that has stepped."""
    found: set[int] = set()
    for optimizer in list(_stepped):
        for group in optimizer.param_groups:
            found.update(_address(param) for param in group["params"])
        for state in optimizer.state.values():
            if isinstance(state, dict):
                found.update(_address(value) for value in state.values() if isinstance(value, torch.Tensor))
    found.discard(0)
    return found


def _address(tensor: torch.Tensor) -> int:
    tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # nor has another wrapper: what it stands for is not proved to be lazy
        return 0
