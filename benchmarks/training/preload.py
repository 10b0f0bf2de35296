"""Imports Megatron with the stand-ins for a GPU, once: ranks are forked from a process that has done this."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with a GPU visible, some tensors would be allocated on it

from benchmarks.worlds import CPU_RECIPE, install_stand_ins  # imports torch

install_stand_ins()
sys.path += [str(CPU_RECIPE), str(CPU_RECIPE.parent)]
importlib.import_module("megatron.training")
pretrain_tiny: Any = importlib.import_module("pretrain_tiny")  # of recipes/
