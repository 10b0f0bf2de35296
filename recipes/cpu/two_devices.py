"""A pretend host beside the pretend device, for Megatron's optimizer that is offloaded to the CPU.

`HybridDeviceOptimizer` asks each parameter whether it is on a device, and copies a fraction of them to the
host. Here all memory is the host's. So while it asks, a tensor is on the device unless it came from `cpu()`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

COPIES = ("detach", "clone", "float", "pin_memory")  # what such a copy is made with: they keep its place


def install() -> None:
    """Lets `HybridDeviceOptimizer` divide parameters between two pretend devices."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def divided(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _pretended():
            return divide(self, *args, **kwargs)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = divided


@contextlib.contextmanager
def _pretended() -> Iterator[None]:
    on_host: dict[int, torch.Tensor] = {}  # held, so that no other tensor gets the same id

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        on_host[id(copied)] = copied
        return copied

    def staying(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = method(self, *args, **kwargs)
            if id(self) in on_host:
                on_host[id(result)] = result
            return result

        return stay

    answers: dict[str, Any] = {name: staying(getattr(torch.Tensor, name)) for name in COPIES}
    answers |= {"is_cuda": property(lambda self: id(self) not in on_host), "cpu": to_host}
    with mock.patch.multiple(torch.Tensor, **answers):
        yield
