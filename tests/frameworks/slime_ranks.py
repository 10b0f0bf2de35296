"""Ranks of test_slime.py: slime's calls of Megatron-LM, rebuilt from its main of 2026-08-21.

The source: github.com/THUDM/slime at 624b824a89, slime/backends/megatron_utils. `save_model` is in actor.py,
`save` and `initialize_model_and_optimizer` in model.py. Megatron sets up the model; its `train` never runs.
"""

import sys
from pathlib import Path
from typing import Any

import pretrain_tiny
import torch.distributed as dist
from megatron.training import get_args
from megatron.training import training as loop
from megatron.training.async_utils import maybe_finalize_async_save
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from model_ranks import Training, step
from saving_rank import report
from swapping import digests, swap_everything

ROLLOUTS = 2


class Slime:
    """`MegatronTrainRayActor`, as far as checkpoints go."""

    def __init__(self, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        self.working = (model, optimizer, scheduler)

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        if get_args().async_save:
            maybe_finalize_async_save(blocking=True)
        save_checkpoint(
            rollout_id,
            *self.working,
            num_floating_point_operations_so_far=0,
            checkpointing_context=None,
            train_data_iterator=None,
            preprocess_common_state_dict_fn=None,
        )
        if force_sync and get_args().async_save:
            maybe_finalize_async_save(blocking=True)

    def load(self) -> int:
        iteration, _ = load_checkpoint(
            *self.working, checkpointing_context={}, skip_load_to_model_and_opt=False
        )
        return int(iteration)


def main(arguments: list[str], folder: str) -> None:
    """Saves after each rollout, swaps everything at once, loads the last one, and reports what differs."""
    sys.argv = ["pretrain_tiny.py", *arguments]
    set_up = loop.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **options: Any) -> Any:
        drive(*set_up(*args, **options)[:3], folder)
        sys.exit(0)

    loop.setup_model_and_optimizer = setup_model_and_optimizer
    pretrain_tiny.main()


def drive(model: list[Any], optimizer: Any, scheduler: Any, folder: str) -> None:
    slime, training = Slime(model, optimizer, scheduler), Training(model, optimizer, {})
    truth: dict[str, str] = {}
    for rollout in range(1, ROLLOUTS + 1):
        step(training, seed=rollout)
        truth = digests(training)
        slime.save_model(rollout, force_sync=False)
        if rollout < ROLLOUTS:
            continue
        swap_everything(training)  # as it sleeps, and before an asynchronous save is over
        swapped = digests(training)
        if get_args().async_save:
            maybe_finalize_async_save(blocking=True)
    dist.barrier()
    get_args().load = get_args().save
    iteration = slime.load()
    became = digests(training)
    report(
        folder,
        iteration=iteration,
        swapped=sum(truth[key] != swapped.get(key) for key in truth),
        different=sorted(key for key in truth.keys() | became.keys() if truth.get(key) != became.get(key)),
        tracker=Path(get_args().save, "latest_checkpointed_iteration.txt").read_text(),
    )
