"""Stored dtypes as torch's, and which other dtypes a tensor may be loaded with.

Belongs here: names and rules. Does not belong here: converting values (in_place.py). torch is imported late,
for commands that only look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_datastates.errors import FormatError, MismatchError

if TYPE_CHECKING:
    import torch


def torch_dtype(name: str, key: str) -> torch.dtype:
    """Returns `torch.bfloat16` for `bfloat16`.

    Args:
        key: of the tensor, for the message.

    Raises:
        FormatError: this torch has no such dtype.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"tensor {key!r} has dtype {name}, which torch {torch.__version__} does not have")
    return dtype


def note_conversion(rounded: dict[str, str], key: str, stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Returns whether a tensor is converted as it is loaded, and notes it if values may be rounded.

    Args:
        rounded: as in Checkpoint; the note is added to it.

    Raises:
        MismatchError: stored values cannot become the dtype that is wanted: floats no integers, for one.
    """
    import torch

    if stored == wanted:
        return False
    is_bool = wanted is torch.bool and not (stored.is_floating_point or stored.is_complex)
    if not (is_bool or torch.can_cast(stored, wanted)):
        raise MismatchError(f"tensor {key!r} was saved as {stored} and cannot become {wanted}")
    is_exact = stored is torch.bool or not (wanted.is_floating_point or wanted.is_complex)
    if wanted.itemsize <= stored.itemsize and not is_exact:
        rounded[key] = f"{stored} as {wanted}".replace("torch.", "")
    return True
