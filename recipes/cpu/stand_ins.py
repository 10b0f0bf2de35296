"""Installs all stand-ins of this folder."""

import contextlib
from pathlib import Path

import fused_adam
import pretend_cuda
import two_devices


def install() -> None:
    """Installs the stand-ins in this process. Call it once, before Megatron is imported."""
    pretend_cuda.install()
    import megatron.core.datasets.utils as dataset_utils

    fused_adam.install()
    two_devices.install()
    _name_absent_layers()
    if not Path(dataset_utils.__file__).with_name("Makefile").exists():
        dataset_utils.compile_helpers = lambda: None  # a wheel has them prebuilt and has no Makefile


def _name_absent_layers() -> None:
    """Makes classes of what is none without Transformer Engine, for main's multi-token prediction."""
    with contextlib.suppress(ImportError):  # not in every release
        from megatron.core.tensor_parallel import inference_layers

        for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
            if not isinstance(getattr(inference_layers, name, object), type):
                setattr(inference_layers, name, type(name, (), {}))
