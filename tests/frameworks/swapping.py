"""What frameworks do to weights and optimizer state right after a save, at worst, and a digest of both."""

from typing import Any

import torch
from model_ranks import Training, leaves
from torch.utils._pytree import tree_map

MARK = -7.0


def inner_optimizers(training: Training) -> list[Any]:
    """Returns the torch optimizers of this rank."""
    return [one.optimizer for one in getattr(training.optimizer, "chained_optimizers", [training.optimizer])]


def digests(training: Training) -> dict[str, str]:
    """Returns a digest of every weight and optimizer state, of copies: NumPy would fix the storages."""

    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    state: list[Any] = [chunk.state_dict() for chunk in training.chunks]
    for optimizer in inner_optimizers(training):
        for group in optimizer.param_groups:
            state.append([(param, optimizer.state[param]) for param in group["params"]])
    return dict(leaves(tree_map(copied, state), ""))


def free_state(training: Training) -> None:
    """Replaces all optimizer state, and frees the memory of the old one."""
    for optimizer in inner_optimizers(training):
        for values in optimizer.state.values():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    values[name] = torch.full_like(value, MARK)
                    value.untyped_storage().resize_(0)


def swap_everything(training: Training) -> None:
    """Frees the memory of all weights, takes it anew with other values, and replaces all optimizer state."""
    found = [param.data for chunk in training.chunks for param in chunk.parameters()]
    found += [p.data for one in inner_optimizers(training) for g in one.param_groups for p in g["params"]]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in found}
    for storage in storages.values():
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes)
    for tensor in found:
        tensor.fill_(MARK)
    free_state(training)
