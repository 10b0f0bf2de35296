"""Installs all stand-ins of this folder."""

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
    if not Path(dataset_utils.__file__).with_name("Makefile").exists():
        dataset_utils.compile_helpers = lambda: None  # a wheel has them prebuilt and has no Makefile
