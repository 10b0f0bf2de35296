"""Device memory that torch has cached, which Megatron need not release for a save of ours.

Megatron 0.17 to 0.19 calls `torch.cuda.empty_cache()` before each save, in every format, so that the process
that writes has room on the device. Our saves write from staging memory in the host and take none. The call
waits for the device, and the next iteration allocates all that memory anew, while tensors are being copied.
Later releases do not call it any more (NVIDIA/Megatron-LM#5678 has figures).

The first save of a process keeps it: collective calls that no step makes take memory of their own then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

_replaced: list[Callable[[], None]] = []  # torch.cuda.empty_cache, as long as it does nothing


@contextlib.contextmanager
def kept_before_save() -> Iterator[None]:
    """Makes `torch.cuda.empty_cache` do nothing until `save_begins` is called, or this scope ends."""
    _replaced.append(torch.cuda.empty_cache)
    torch.cuda.empty_cache = lambda: None
    try:
        yield
    finally:
        save_begins()


def save_begins() -> None:
    """Restores `torch.cuda.empty_cache`."""
    while _replaced:
        torch.cuda.empty_cache = _replaced.pop()
