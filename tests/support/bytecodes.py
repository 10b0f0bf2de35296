"""Interrupts between two bytecodes, as a signal handler that raises may make them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection
from typing import Any


def interrupted(act: Callable[[], object], files: str | Collection[str], number: int) -> bool:
    """Calls `act`; raises KeyboardInterrupt in it before the bytecode of that number in a file, or in files.

    Returns whether there are so many, from 1 on. The interrupt is caught here.
    """
    left, files = number, {files} if isinstance(files, str) else files

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys._getframe().f_trace_opcodes = True  # 3.12 looks for such a frame when tracing begins
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
