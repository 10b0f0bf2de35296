"""Makes the stand-ins for a CUDA device precede every import of Megatron and Transformer Engine."""

import importlib.util
import sys

from tests.support.tiny import RECIPES

if importlib.util.find_spec("transformer_engine") is not None:  # else nothing here runs
    sys.path[:0] = [str(RECIPES), str(RECIPES / "cpu")]
    import stand_ins

    stand_ins.install()
