"""Takes from a test, which root may run, the right to read what permissions deny."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION = 0x20080522  # of the calls: _LINUX_CAPABILITY_VERSION_3
_BEYOND_PERMISSIONS = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_Words = ctypes.c_uint32 * 6  # effective, permitted, inheritable; then the same of capabilities from 32 on


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Permissions of files count in this thread, also for root."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, words = (ctypes.c_uint32 * 2)(_VERSION, 0), _Words()
    if libc.capget(header, words) != 0:
        pytest.skip("capabilities cannot be read here")
    before = words[0]
    words[0] = before & ~_BEYOND_PERMISSIONS
    if libc.capset(header, words) != 0:
        pytest.skip("capabilities cannot be changed here")
    try:
        yield
    finally:
        words[0] = before
        libc.capset(header, words)
