"""A stand-in for Transformer Engine's FusedAdam, with states of lower precision as Megatron configures them.

What belongs here: the methods that Megatron calls. What does not: Adam's arithmetic; any new values will do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer, optimizer_config

SCALE = 8  # of gradients: exact in all dtypes, and integers have values, too


class FusedAdam(torch.optim.Optimizer):
    """Main parameters and moments are its states; the parameters given are the model's own."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        master_weights: bool,
        use_decoupled_grad: bool,
        master_weight_dtype: torch.dtype,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        store_param_remainders: bool = False,
        **unused: Any,
    ) -> None:
        assert master_weights and use_decoupled_grad
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        # As there: remainders, the 16 bits that bfloat16 weights lack, are those of float32.
        has_remainders = store_param_remainders and master_weight_dtype is torch.float32
        self.dtypes["master_param"] = torch.int16 if has_remainders else master_weight_dtype
        super().__init__(params, {"lr": lr, "step": 0})

    def initialize_state(self, param: torch.Tensor, *unused: Any) -> None:
        self.state[param] = {
            name: torch.zeros_like(param, dtype=dtype) for name, dtype in self.dtypes.items()
        }
        self.state[param]["master_param"].copy_(param)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param)
                for number, state in enumerate(self.state[param].values()):
                    state.add_((SCALE * param.decoupled_grad).to(state.dtype), alpha=number + 1)
                param.data.copy_(self.state[param]["master_param"])

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Returns a new tensor for scaled states, which are those of float16."""
        state: torch.Tensor = self.state[param][name]
        return state.float() if state.dtype is torch.float16 else state

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        assert (value.dtype is torch.int16) == (self.dtypes[name] is torch.int16)
        self.state[param][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states in their own dtypes; torch's method would cast them to the parameters' dtype."""
        super().load_state_dict(state_dict)
        for group, stored in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, number in zip(group["params"], stored["params"], strict=True):
                if found := state_dict["state"].get(number):
                    self.state[param] = {name: value.to(self.dtypes[name]) for name, value in found.items()}


def installed(main_params_dtype: torch.dtype) -> dict[str, Any]:
    """Installs it in Megatron; returns the fields of OptimizerConfig that enable it."""
    module = ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    for asking in (optimizer, optimizer_config, distrib_optimizer):
        if hasattr(asking, "is_te_min_version"):  # before 0.19 it fails without Transformer Engine
            asking.is_te_min_version = lambda *_: True
        if hasattr(asking, "Adam"):
            asking.Adam = FusedAdam
    return {
        "use_precision_aware_optimizer": True,
        "main_params_dtype": main_params_dtype,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.float16,
    }
