"""Ranks of test_torchtitan.py: torchtitan's checkpoint manager, derived from by ours, on FSDP2 with gloo."""

import hashlib
from pathlib import Path
from typing import Any

import dcp_ranks
import torch
from saving_rank import join, report
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torchtitan.components import checkpoint as titan

from megatron_datastates.dcp.torchtitan import CheckpointManager
from megatron_datastates.pipeline.runs.runs import format_of


class Optimizer(Stateful):
    """Takes the place of torchtitan's container of optimizers."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state_dict)


class Steps(Stateful):
    """Counts, as torchtitan's trainer does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": [0.5] * self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])
        assert state_dict["losses"] == [0.5] * self.step


class Run:
    """A model that trains, and a manager of its checkpoints."""

    def __init__(self, folder: Path, seed: int, mode: str, kind: Any = CheckpointManager) -> None:
        self.model, self.optimizer = dcp_ranks.build(seed)
        self.steps = Steps(0)
        config = kind.Config(
            enable=True,
            folder=str(folder),
            interval=1,
            async_mode=mode,
            keep_latest_k=3,
            last_save_model_only=False,
        )
        self.manager = config.build(
            dataloader=Steps(7),
            model_parts=[self.model],
            optimizers=Optimizer(self.model, self.optimizer),
            lr_schedulers=Steps(1),
            states={titan.TRAIN_STATE: self.steps},
            sd_adapter=None,
        )
        assert type(self.manager) is kind

    def train(self, step: int) -> None:
        dcp_ranks.train(self.model, self.optimizer, step)
        self.steps.step = step

    def digest(self) -> str:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        found = hashlib.sha256()
        for name, value in sorted(dcp_ranks.leaves(state), key=lambda item: item[0]):
            local = value.to_local() if isinstance(value, DTensor) else value
            text = (
                local.detach().clone().numpy().tobytes() if isinstance(local, torch.Tensor) else repr(local)
            )
            found.update(f"{name} ".encode() + (text if isinstance(text, bytes) else text.encode()))
        return found.hexdigest()


def save_and_resume(checkpoints: str, mode: str, reports: str) -> None:
    join()
    folder = Path(checkpoints)
    run, after = Run(folder, 1, mode), {}
    for step in range(1, 6):
        run.train(step)
        after[step] = run.digest()
        assert run.manager.save(step, last_step=step == 5)
        run.manager.maybe_wait_for_staging()
    run.manager.maybe_wait_for_saving()
    run.train(6)
    run.manager.close()
    formats = {path.name: format_of(path) for path in sorted(folder.iterdir())}

    stock = Run(folder, 1, "disabled", titan.CheckpointManager)
    assert stock.manager._find_load_step() == -1, "torchtitan itself does not take ours for its own"
    stock.manager.close()

    again = Run(folder, 9, mode)
    assert again.digest() != after[5]
    assert again.manager.load()
    newest = (again.steps.step, again.digest() == after[5])
    assert again.manager.load(step=4)
    chosen = (again.steps.step, again.digest() == after[4])

    # A step that DCP's own writer has saved is found and loaded, too.
    stock = Run(folder, 1, "disabled", titan.CheckpointManager)
    stock.train(8)
    expected = stock.digest()
    stock.manager.save(8)
    stock.manager.close()
    assert again.manager.load()
    of_dcp = (again.steps.step, again.digest() == expected, format_of(folder / "step-8"))
    again.manager.close()
    report(reports, formats=formats, newest=newest, chosen=chosen, of_dcp=of_dcp)
