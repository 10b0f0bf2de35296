"""Puts every stand-in of this folder in place. Only the list of them belongs here."""

from pathlib import Path

import fused_adam
import pretend_cuda


def install() -> None:
    """Call it once, before Megatron is imported, in a process that shall see no GPU."""
    pretend_cuda.install()
    import megatron.core.datasets.utils as dataset_utils

    fused_adam.install()
    if not Path(dataset_utils.__file__).with_name("Makefile").exists():
        dataset_utils.compile_helpers = lambda: None  # a wheel carries them built, and no Makefile
