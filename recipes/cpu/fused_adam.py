"""A FusedAdam in plain torch, with the state layout of Apex's and Transformer Engine's.

At a resume, Megatron's distributed optimizer reads the inner optimizer's state before the first step. The
fused optimizers keep `step` in the parameter group, where it always exists. `torch.optim.AdamW`, which
Megatron uses without them, keeps it per parameter and creates it in the first step. So stock Megatron
cannot resume a distributed optimizer without Apex or Transformer Engine, neither on a GPU nor on a CPU.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW with decoupled decay and bias correction, one parameter at a time.

    It computes in the parameter's own dtype, which is fp32 for Megatron's main parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **ignored: object,
    ) -> None:
        if not (bias_correction and adam_w_mode):
            raise ValueError(
                "this stand-in supports only AdamW with bias correction: set bias_correction and adam_w_mode"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient, in place.

        All parameters get states, as with Transformer Engine's: those without elements on this rank have no
        gradient, and Megatron-FSDP's saves are collective calls for each state.
        """
        if closure is not None:
            raise ValueError("this stand-in takes no closure; Megatron passes none")
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.state[param] = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                if param.grad is not None:
                    self._update(param, group)
        return None

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        assert param.grad is not None
        grad, (beta1, beta2) = param.grad.to(param.dtype), group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        unbiased = (square / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(mean, unbiased, value=-group["lr"] / (1 - beta1 ** group["step"]))


def install() -> None:
    """Makes Megatron's optimizer factory build this class in place of the fused one."""
    import megatron.core.optimizer as factory
    import megatron.core.optimizer.distrib_optimizer as distributed

    for module in (factory, distributed):
        module.Adam = FusedAdam
    factory.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = True
    # Megatron stores the class of an optimizer that is partly offloaded to the CPU.
    torch.serialization.add_safe_globals([FusedAdam])
