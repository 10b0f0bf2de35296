"""Device memory that torch has cached, which a training loop need not release for a save of ours.

Megatron 0.17 to 0.19, and Megatron-Bridge, call `torch.cuda.empty_cache()` before each save, in every format,
so that the process that writes has room on the device. Our saves write from staging memory in the host and
take none. The call waits for the device, and the next iteration allocates all that memory anew, while
tensors are being copied. Later releases of Megatron do not call it (NVIDIA/Megatron-LM#5678 has figures).

The first save of a loop releases it: collective calls that no step makes take memory of their own then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_datastates.mcore.hooks.calls import parameters_of

_replaced: list[Callable[[], None]] = []  # torch.cuda.empty_cache, as long as it does nothing
_has_saved = False


def wrap_save_and_time(
    original: Callable[..., Any], *args: Any, is_ours: Callable[[Mapping[str, Any]], bool], **kwargs: Any
) -> Any:
    """Wraps a loop's function that calls `save_checkpoint`; `is_ours` gets the arguments of a call."""
    if not _has_saved or not is_ours(parameters_of(original).of_call(args, kwargs)):
        return original(*args, **kwargs)
    _replaced.append(torch.cuda.empty_cache)
    try:
        torch.cuda.empty_cache = lambda: None
        return original(*args, **kwargs)
    finally:
        _restore()


def forget_saves() -> None:
    """Notes that a loop begins, maybe after a restart within the process, with new communicators."""
    global _has_saved
    _has_saved = False


@contextlib.contextmanager
def saving(*, is_ours: bool) -> Iterator[None]:
    """Surrounds `save_checkpoint`, during which `torch.cuda.empty_cache` is torch's own."""
    global _has_saved
    _restore()
    yield
    _has_saved = _has_saved or is_ours


def _restore() -> None:
    while _replaced:
        torch.cuda.empty_cache = _replaced.pop()
