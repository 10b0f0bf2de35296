"""Checks of what is installed: Python, torch, Megatron-Core, and whether this package is active in it.

Also of the options that the environment sets, with which the trial saves and loads.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from importlib.metadata import entry_points

import torch

from megatron_datastates import __version__
from megatron_datastates.config import ACTIVATION, ENVIRONMENT_PREFIX, Options, is_activated
from megatron_datastates.errors import HookPointError, OptionError, describe_error
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.hooks.attach import attach_loading, attach_saving, attach_training
from megatron_datastates.preflight.checks import Check, failed, noted, ok, tried

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def software() -> list[Check]:
    """Returns one result each for torch, this package, activation, Megatron and options."""
    device = "no GPU"
    if torch.cuda.is_available():
        device = f"CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}"
    python = f"Python {platform.python_version()}, torch {torch.__version__}, {device}"
    release = ok("release", f"megatron_datastates {__version__}")
    return [
        ok("python", python),
        release,
        tried("activation", _activation),
        _megatron(),
        tried("options", _options),
    ]


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
    if not is_activated():
        return noted("activation", f"{ACTIVATION}={os.environ[ACTIVATION]} switches this package off")
    return ok("activation", "`import torch` activates this package")


def _megatron() -> Check:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return noted("megatron", "megatron-core is not installed: only ds.save, ds.load and DCP work")
    try:
        version = versions.installed_version()
        has_loop = importlib.util.find_spec("megatron.training") is not None
        attach_loading(in_loop=has_loop)
        attach_saving()
        if has_loop:
            attach_training()
    except (HookPointError, OptionError) as error:
        return failed("megatron", str(error))
    except Exception as error:  # of Megatron's modules, and of all that they import
        text = f"its modules cannot be imported: {type(error).__name__}: {describe_error(error)}"
        return failed("megatron", text)
    shown = version.partition("+")[0]  # Megatron adds the commit of the directory that it is imported in
    if not has_loop:
        return noted(
            "megatron",
            f"megatron-core {shown} without megatron.training: --ckpt-format needs Megatron-LM's checkout "
            "(on the PYTHONPATH)",
        )
    if not versions.is_tested(version):
        untested = f"megatron-core {shown} is untested, so saves are not lazy (docs/operations.md)"
        return noted("megatron", untested)
    return ok("megatron", f"megatron-core {shown}: tested; all hook points exist")


def _options() -> Check:
    near = Options.from_environment().near
    names = sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX))
    text = ", ".join(f"{name}={os.environ[name]}" for name in names) or "none are set in the environment"
    if near:
        return noted("options", f"{text}; the near tier is not tried: run this with {near} as DIR, too")
    return ok("options", text)
