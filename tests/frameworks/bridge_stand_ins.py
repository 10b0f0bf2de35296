"""Imports a released Megatron-Bridge on a machine without a GPU.

Bridge's own code runs unchanged. Empty stand-ins take the places of packages that need a GPU, or only serve
features that these tests do not use: Transformer Engine (for LoRA adapters), nvidia-resiliency-ext (for
restarts within a process), ModelOpt, Energon. Megatron-Core must not find the first two, so they exist only
while Bridge imports them.
"""

import contextlib
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import stand_ins
from absent import Empty

EMPTY = (
    "megatron.energon",
    "megatron.energon.task_encoder",
    "modelopt",
    "modelopt.torch",
    "modelopt.torch.distill",
    "modelopt.torch.distill.plugins",
    "modelopt.torch.distill.plugins.megatron",
    "modelopt.torch.opt",
    "modelopt.torch.opt.plugins",
)
RESTARTS = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess")
ENGINE = ("transformer_engine", "transformer_engine.pytorch")


def install() -> None:
    """Installs the stand-ins, and imports Bridge's training loop. Call it once."""
    stand_ins.install()
    importlib.import_module("megatron.core.extensions.transformer_engine")
    for name in EMPTY:
        sys.modules[name] = Empty(name)
    _import_adapters()
    importlib.import_module("megatron.bridge.training.checkpointing")
    with _present(RESTARTS):
        importlib.import_module("megatron.bridge.training.pretrain")


@contextlib.contextmanager
def _present(names: tuple[str, ...]) -> Iterator[None]:
    for name in names:
        sys.modules[name] = Empty(name)
    yield
    for name in names:
        del sys.modules[name]


def _import_adapters() -> None:
    packages = ("megatron.bridge", "megatron.bridge.peft")
    for name in packages:
        _without_init(name)
    with _present(ENGINE):
        importlib.import_module("megatron.bridge.peft.lora_layers")
    for name in packages:
        del sys.modules[name]
    del sys.modules["megatron"].bridge  # type: ignore[attr-defined]


def _without_init(name: str) -> None:
    parent, _, leaf = name.rpartition(".")
    package = types.ModuleType(name)
    package.__path__ = [
        str(Path(one, leaf)) for one in sys.modules[parent].__path__ if Path(one, leaf).is_dir()
    ]
    package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = package
    setattr(sys.modules[parent], leaf, package)
