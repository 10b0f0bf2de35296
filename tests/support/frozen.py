"""Frozen weights in a tiny pretraining: what LoRA, or a tower that is not trained, is for a checkpoint.

Belongs here: freezing parameters before Megatron makes its optimizer, and changing them in the middle of a
run. Two environment variables switch it on, so that any run of tests/support/tiny.py can be one of these.
"""

import os
import re
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.training import get_args
from megatron.training import training as loop

FROZEN = "TINY_FROZEN"  # pattern of the names of parameters
CHANGED_AFTER = "TINY_FROZEN_CHANGES_AFTER"  # iteration after which 1 is added to them


def install() -> None:
    """Does what the environment asks for. Call it before Megatron makes the model."""
    pattern, changed_after = os.environ.get(FROZEN), os.environ.get(CHANGED_AFTER)
    if pattern is None:
        return
    frozen: list[torch.Tensor] = []
    make, take_step = GPTModel.__init__, loop.train_step

    def init(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        for name, parameter in self.named_parameters():
            if re.search(pattern, name):
                frozen.append(parameter.requires_grad_(False))

    def train_step(*args: Any, **options: Any) -> Any:
        results = take_step(*args, **options)
        if changed_after is not None and get_args().curr_iteration + 1 == int(changed_after):
            for parameter in frozen:
                parameter.data += 1
        return results

    GPTModel.__init__, loop.train_step = init, train_step
