"""The compiled module, or a clear word about why it is not there."""

from __future__ import annotations

from megatron_datastates.errors import NativeModuleError

try:
    from megatron_datastates.engine import _native
except ImportError as error:
    raise NativeModuleError(
        f"the compiled part of megatron_datastates does not load ({error}). It is built by "
        "`pip install .` for one Python and one platform: install again with the Python that runs this."
    ) from error

close_in_forked_child = _native.close_in_forked_child
Engine = _native.Engine
forget_descriptor = _native.forget_descriptor
Milestone = _native.Milestone
SaveJob = _native.SaveJob
crc32c = _native.crc32c
describe_tensors = _native.describe_tensors
Reader = _native.Reader
EAGER_FLAG = _native.EAGER_FLAG
DEVICE_FLAG = _native.DEVICE_FLAG
