"""Saves with arguments that another process parsed, as frameworks on Ray do: new processes, no forks.

    python pickled_rank.py drive FILE ARGUMENTS...    parses and validates, as a driver
    python pickled_rank.py save|load FILE FOLDER      a worker: takes one step and saves, or loads
    python pickled_rank.py unhooked|detached ...      as `save`, where this package cannot attach to Megatron

Nothing here imports this package except `detached`, which breaks it.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import stand_ins

stand_ins.install()


def drive(file: str, *arguments: str) -> None:
    from megatron.training.arguments import parse_args, validate_args

    sys.argv = ["driver.py", *arguments]
    args = parse_args()
    validate_args(args)
    Path(file).write_bytes(pickle.dumps(args))


def enter(file: str) -> tuple[Any, Any, Any]:
    """Sets Megatron up with the driver's arguments; returns model, optimizer and scheduler.

    Their state is loaded if the arguments have --load.
    """
    import os

    import pretrain_tiny
    from megatron.core.enums import ModelType
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import setup_model_and_optimizer

    args = pickle.loads(Path(file).read_bytes())
    args.rank, args.local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    set_global_variables(args)
    initialize_megatron()
    made: tuple[Any, Any, Any] = setup_model_and_optimizer(
        ModelType.encoder_or_decoder, pretrain_tiny.build_model
    )
    return made


def report(folder: str, made: tuple[Any, Any, Any]) -> None:
    from megatron.training import get_args
    from tiny_rank import Recorder

    recorder = Recorder()
    recorder._working = made
    facts = {"iteration": get_args().iteration, "state": recorder.state()}
    Path(folder, f"rank{get_args().rank}.json").write_text(json.dumps(facts))


def save(file: str, folder: str) -> None:
    made = enter(file)
    from megatron.training.async_utils import maybe_finalize_async_save
    from megatron.training.checkpointing import save_checkpoint

    model, optimizer, scheduler = made
    for chunk in model:
        for number, param in enumerate(chunk.parameters()):
            param.main_grad.fill_(0.01 * (number + 1))
    optimizer.step()
    scheduler.step(increment=2)
    save_checkpoint(1, model, optimizer, scheduler, 0, checkpointing_context={})
    maybe_finalize_async_save(blocking=True, terminate=True)
    report(folder, made)


def load(file: str, folder: str) -> None:
    report(folder, enter(file))


def unhooked(file: str, folder: str) -> None:
    """Saves with a Megatron that lacks a hook point that saves need."""
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    del FullyParallelSaveStrategyWrapper.apply_saving_parallelization
    save(file, folder)


def detached(file: str, folder: str) -> None:
    """Saves where attaching this package to Megatron fails at import."""
    from megatron_datastates.mcore.hooks import versions

    versions.release_of = None
    save(file, folder)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
