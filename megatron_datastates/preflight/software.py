"""Checks of what is installed: Python, torch, Megatron-Core, and whether this package is active in it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from importlib.metadata import entry_points

import torch

from megatron_datastates.errors import HookPointError
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.hooks.attach import attach_saving, attach_training
from megatron_datastates.preflight.checks import Check, failed, noted, ok

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def software() -> list[Check]:
    """Returns one result each for torch, activation and Megatron."""
    device = "no GPU"
    if torch.cuda.is_available():
        device = f"CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}"
    python = f"Python {platform.python_version()}, torch {torch.__version__}, {device}"
    return [ok("python", python), _activation(), *_megatron()]


def _activation() -> Check:
    names = {point.name for point in entry_points(group="torch.backends")}
    if "megatron_datastates" not in names:
        return noted(
            "activation",
            "not installed, but found on the path: a program has to import megatron_datastates.mcore before "
            "Megatron; or `pip install` it",
        )
    if os.environ.get(_AUTOLOAD, "1") != "1":
        return noted(
            "activation",
            f"{_AUTOLOAD}={os.environ[_AUTOLOAD]}, so `import torch` does not activate this package: unset "
            "it, or let programs import megatron_datastates.mcore before Megatron",
        )
    return ok("activation", "`import torch` activates this package")


def _megatron() -> list[Check]:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return [noted("megatron", "megatron-core is not installed: only ds.save, ds.load and DCP work")]
    version = versions.installed_version()
    shown = version.partition("+")[0]  # Megatron adds the commit of the directory that it is imported in
    try:
        attach_saving()
        if importlib.util.find_spec("megatron.training") is None:
            return [
                noted(
                    "megatron",
                    f"megatron-core {shown} without megatron.training: --ckpt-format needs Megatron-LM's "
                    "checkout (on the PYTHONPATH)",
                )
            ]
        attach_training()
    except HookPointError as error:
        return [failed("megatron", str(error))]
    if not versions.is_tested(version):
        untested = f"megatron-core {shown} is untested, so saves are not lazy (docs/operations.md)"
        return [noted("megatron", untested)]
    return [ok("megatron", f"megatron-core {shown}: tested; all hook points exist")]
