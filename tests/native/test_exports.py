"""The native module keeps its C++ library to itself: no other library replaces its functions."""

import subprocess

from megatron_datastates.engine import _native


def test_the_module_exports_its_own_functions_only() -> None:
    command = ["nm", "--dynamic", "--defined-only", "--format=just-symbols", _native.__file__]
    names = subprocess.check_output(command, text=True).split()
    assert [name for name in names if "10datastates" not in name] == ["PyInit__native"]
