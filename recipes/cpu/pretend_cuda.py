"""A pretend CUDA device in host memory, for Megatron's training loop on a machine without a GPU.

What belongs here: replacements for the functions of `torch.cuda` that `megatron.training` and
`megatron.core` call, and for the functions that put a tensor on a device. What does not: arithmetic,
collectives, checkpointing. Those must stay real, or a test on these stand-ins would prove nothing.

Call `install()` before Megatron is imported. It changes the process permanently.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

QUIET = ("set_device", "synchronize", "manual_seed", "empty_cache", "_lazy_init", "cudart")
ZERO = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
TYPED = ("Float", "Int", "Long", "Byte", "BFloat16", "Double", "Half")
CONSTRUCTORS = (
    *(
        "empty",
        "zeros",
        "ones",
        "full",
        "tensor",
        "as_tensor",
        "arange",
        "linspace",
        "rand",
        "randn",
        "randint",
    ),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
)


class HostEvent:
    """An event that is always complete: host work is done when its call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


class HostStream:
    """A stream with nothing in it. `cuda_stream` is the handle of CUDA's default stream."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __enter__(self) -> "HostStream":
        return self

    def __exit__(self, *exception: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event or HostEvent()


class HostProperties:
    """The pretend device's properties, for `torch.cuda.get_device_properties`."""

    name = "host memory"
    major, minor = 9, 0
    multi_processor_count = 1
    total_memory = 128 << 30


class OneGenerator(dict[Any, torch.Generator]):
    """A stand-in for `torch.cuda.default_generators`: the CPU's generator for every device."""

    def __missing__(self, device: object) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def install() -> None:
    """Turns "cuda" into host memory everywhere in this process."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _pretend_device(torch.cuda)
    _pretend_streams(torch.cuda)
    _share_generator(torch.cuda)
    _allocate_on_host()
    _move_to_host()
    _mesh_of_hosts()
    torch.compile = _do_not_compile  # type: ignore[assignment]


def _always(answer: object) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _pretend_device(cuda: Any) -> None:
    for name in QUIET:
        setattr(cuda, name, _always(None))
    for name in ZERO:
        setattr(cuda, name, _always(0))
    for name in TYPED:
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    cuda.is_available = cuda.is_initialized = _always(True)
    cuda.device_count = _always(8)
    cuda.current_device = _always(0)
    cuda.get_device_capability = _always((HostProperties.major, HostProperties.minor))
    cuda.get_device_properties = _always(HostProperties())
    cuda.memory_stats = lambda *args, **kwargs: {}


def _pretend_streams(cuda: Any) -> None:
    cuda.Stream, cuda.Event = HostStream, HostEvent
    cuda.stream = cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: HostStream()
    cuda.is_current_stream_capturing = _always(False)
    if hasattr(torch, "accelerator"):  # newer optimizers ask there
        torch.accelerator.current_stream = lambda *args, **kwargs: HostStream()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _always(0)


def _share_generator(cuda: Any) -> None:
    """Lets both devices share the CPU's generator: a draw for "the GPU" advances it."""
    cuda.default_generators = OneGenerator()
    cuda._lazy_call = lambda call, *args, **kwargs: call()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)


def _is_cuda(device: object) -> bool:
    """Says whether this names a device of CUDA, for whose number a plain integer stands."""
    return type(device) is int or (not isinstance(device, torch.Tensor) and "cuda" in str(device))


def _host_keyword(kwargs: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return kept | {"device": "cpu"} if _is_cuda(kwargs.get("device", "")) else kept


def _allocate_on_host() -> None:
    def on_host(constructor: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: constructor(*args, **_host_keyword(kwargs))

    for name in CONSTRUCTORS:
        setattr(torch, name, on_host(getattr(torch, name)))


def _move_to_host() -> None:
    real_to, real_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        moved: list[Any] = ["cpu" if _is_cuda(value) else value for value in args]
        return real_to(self, *moved, **_host_keyword(kwargs))

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron sorts gradients by type name and knows only the names of CUDA types.
        answer = real_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    def stay(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    for owner, name, stand_in in (
        (torch.Tensor, "to", to),
        (torch.Tensor, "type", type_),
        (torch.Tensor, "cuda", stay),
        (torch.Tensor, "pin_memory", stay),
        (torch.nn.Module, "cuda", stay),
    ):
        setattr(owner, name, stand_in)


def _mesh_of_hosts() -> None:
    """Makes meshes of devices (FSDP's, DTensor's) meshes of hosts, so that collective calls reach gloo."""
    from torch.distributed.device_mesh import DeviceMesh

    real_init = DeviceMesh.__init__

    def init(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        real_init(self, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)

    DeviceMesh.__init__ = init  # type: ignore[method-assign]


def _do_not_compile(function: Any = None, *args: object, **kwargs: object) -> Any:
    return function if callable(function) else lambda decorated: decorated
