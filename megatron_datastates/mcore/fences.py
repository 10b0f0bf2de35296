"""Who fences: every place where Megatron is about to change memory that a save may still be reading."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_datastates.engine.fence import FENCE

# Optimizers whose pre-step hook has fired: their memory is known to change behind a fence only.
_stepped: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = False


def fence(reason: str = "an explicit fence") -> None:
    """Returns when everything that saves still read may change.

    Callers that change tensors otherwise than by an optimizer's step call it before (see
    `DataStatesSaveStrategy(assume_immutable=True)`).
    """
    FENCE.wait(reason)


def install() -> None:
    """Fences every optimizer step of this process. Idempotent."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        _installed = True


def witnessed(original: Callable[..., Any]) -> Callable[..., Any]:
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


before_offload = _fenced("offloading")  # resizes storages to nothing, or refills them
before_graph_replay = _fenced("the optimizer's CUDA graph")  # a replayed graph runs no hooks
before_gather = _fenced("the gathering of parameters")  # into ranks whose own optimizer may be empty


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # a captured step runs later, without hooks; its replay is fenced elsewhere
    fence("the optimizer step")
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
