"""Ranks of test_frameworks.py: each framework's own save and load, or the calls that it makes.

A framework is a class with `save(directory)`, which returns as soon as the framework's own function would,
`finish()` and `load(directory)`. Classes named after a wheel run the wheel's file; what else it imports is
Empty (absent.py).
"""

import logging
import os
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from absent import run_released
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from model_ranks import Layout, Training, build, random_values, step
from saving_rank import MCORE_QUEUE, failure_of, join, report
from swapping import digests, swap_everything

from megatron_datastates.mcore import enable


def data_parallel_group() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


class Calls:
    """The calls that all of them make on Megatron-Core, in its forms: see docs/frameworks.md for the sources.

    Three checkpoints at once, as in verl, with the strategy by class, by Megatron's default function, as in
    SkyRL, NeMo 2 and ms-swift, and not named at all, as in the ModelOpt state that Megatron-Bridge stores.
    """

    def __init__(self, training: Training, is_async: bool) -> None:
        self.training, self.is_async, self.queue = training, is_async, AsyncCallsQueue()

    def parts(self) -> dict[str, dict[str, Any]]:
        state = self.training.sharded()
        optimizer = state.pop("optimizer")
        return {"model": state, "optimizer": {"optimizer": optimizer}, "extra": {"step": 7}}

    def strategies(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies import torch as home

        named = home.TorchDistSaveShardedStrategy("torch_dist", 1)
        return {
            "model": FullyParallelSaveStrategyWrapper(named, data_parallel_group()),
            "optimizer": FullyParallelSaveStrategyWrapper(
                get_default_save_sharded_strategy("torch_dist"), data_parallel_group()
            ),
            "extra": None,
        }

    def save(self, directory: Path) -> None:
        for name, state in self.parts().items():
            (directory / name).mkdir(parents=True, exist_ok=True)
            chosen = {"sharded_strategy": self.strategies()[name]} if name != "extra" else {}
            request = dist_checkpointing.save(
                sharded_state_dict=state,
                checkpoint_dir=str(directory / name),
                async_sharded_save=self.is_async,
                **chosen,
                **MCORE_QUEUE,
            )
            if request is not None:
                self.queue.schedule_async_request(request)

    def finish(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)

    def load(self, directory: Path) -> None:
        """Loads as verl does, which asks for the optimizer when the model's state holds tensors."""
        from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy

        def part(name: str, state: dict[str, Any]) -> dict[str, Any]:
            where = str(directory / name)
            default = get_default_load_sharded_strategy(where)
            strategy = FullyParallelLoadStrategyWrapper(default, data_parallel_group())
            loaded: dict[str, Any] = dist_checkpointing.load(state, where, strategy)
            return loaded

        training = self.training
        model = {"model": training.chunks[0].sharded_state_dict(metadata=training.metadata)}
        loaded = part("model", dict(model))
        state = training.optimizer.sharded_state_dict(model, is_loading=True, metadata=training.metadata)
        loaded |= part("optimizer", {"optimizer": state})
        assert part("extra", {"step": 0})["step"] == 7
        training.accept(loaded)


class Verl:
    """`MegatronCheckpointManager.save_checkpoint` and `load_checkpoint`.

    The queue that it uses for asynchronous saves is only in older releases of Megatron-Core.
    """

    def __init__(self, training: Training, is_async: bool) -> None:
        places = {
            f"get_{name}_dist_checkpoint_path": (lambda root, name=name: self._place(root, name))
            for name in ("model", "optimizer", "extra")
        }
        calls = run_released("verl", "verl/utils/megatron/dist_checkpointing.py", ("verl",), {})
        given = {
            "verl.utils.megatron_utils": places,
            "verl.utils.fs": {"local_mkdir_safe": self._made, "is_non_local": lambda path: False},
            "verl.utils.device": {"get_device_name": lambda: "cpu", "is_device_available": lambda: False},
            "verl.utils.megatron.dist_checkpointing": vars(calls),
        }
        module = run_released(
            "verl", "verl/utils/checkpoint/megatron_checkpoint_manager.py", ("verl", "transformers"), given
        )
        owner = module.MegatronCheckpointManager
        manager = self.manager = owner.__new__(owner)
        contents = ["model", "optimizer", "extra"]
        sharding = training.metadata["distrib_optim_sharding_type"]
        megatron = SimpleNamespace(
            dist_ckpt_optim_fully_reshardable=sharding == "fully_reshardable",
            distrib_optim_fully_reshardable_mem_efficient=False,
        )
        vars(manager).update(
            model=training.chunks,
            optimizer=training.optimizer,
            lr_scheduler=None,
            use_checkpoint_opt_param_scheduler=False,
            checkpoint_config=SimpleNamespace(async_save=is_async),
            checkpoint_save_contents=contents,
            checkpoint_load_contents=contents,
            **{f"should_{verb}_{what}": True for verb in ("save", "load") for what in ("optimizer", "extra")},
            use_dist_checkpointing=True,
            use_distributed_optimizer=True,
            use_megatron_fsdp=False,
            peft_cls=None,
            bridge=None,
            role="actor",
            config=SimpleNamespace(actor=SimpleNamespace(megatron=megatron)),
            rank=dist.get_rank(),
            _save_transformer_config=lambda path: None,
            _write_checkpoint_manifest=lambda *what: None,
            ensure_checkpoint_capacity=lambda number: None,
            previous_global_step=None,
            register_checkpoint=lambda *what: None,
            _raise_for_old_layout=lambda path: None,
        )

    @staticmethod
    def _made(path: str) -> str:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        return path

    def _place(self, root: str, name: str) -> str:
        return self._made(str(Path(root, name, "dist_ckpt")))

    def save(self, directory: Path) -> None:
        self.manager.save_checkpoint(str(directory), global_step=1)

    def finish(self) -> None:
        """Does as verl's worker (verl/workers/megatron_workers.py)."""
        if self.manager.checkpoint_config.async_save:
            from megatron.core.dist_checkpointing.strategies.base import async_calls

            async_calls.maybe_finalize_async_calls(blocking=True)

    def load(self, directory: Path) -> None:
        self.manager.load_checkpoint(str(directory))


class MsSwift:
    """`save_mcore_checkpoint` and `load_mcore_checkpoint`."""

    def __init__(self, training: Training, is_async: bool) -> None:
        from megatron.core.utils import unwrap_model

        logger = logging.getLogger("swift")
        logger.info_once = logger.info  # type: ignore[attr-defined]
        given = {
            "mcore_bridge": {"unwrap_model": unwrap_model},
            "transformers.utils": {"is_torch_npu_available": lambda: False},
            "swift.utils": {
                "check_json_format": lambda value: value,
                "get_logger": lambda: logger,
                "is_master": lambda: dist.get_rank() == 0,
            },
        }
        self.module = run_released(
            "ms-swift",
            "swift/megatron/utils/megatron_lm_utils.py",
            ("swift", "mcore_bridge", "transformers"),
            given,
        )
        self.training = training
        self.arguments = Namespace(
            async_save=is_async,
            data_parallel_random_init=False,
            dist_ckpt_save_pre_mcore_014=False,
            dist_ckpt_optim_fully_reshardable=False,
            finetune=False,
            no_load_optim=False,
            no_load_rng=False,
            no_save_optim=False,
            no_save_rng=False,
            pipeline_model_parallel_size=1,
            tensor_model_parallel_size=1,
            tuner_type="full",
            use_distributed_optimizer=True,
            use_megatron_fsdp=False,
            rank=dist.get_rank(),
            local_rank=dist.get_rank(),
        )

    def save(self, directory: Path) -> None:
        self.module.save_mcore_checkpoint(
            self.arguments,
            self.training.chunks,
            self.training.optimizer,
            iteration=3,
            output_dir=str(directory),
        )
        if dist.get_rank() == 0:  # before an asynchronous save is over: docs/frameworks.md
            assert (directory / "latest_checkpointed_iteration.txt").read_text() == "3"
        if self.arguments.async_save:
            dist.barrier()  # all ranks find that file
            with pytest.raises(CheckpointingException):
                self.load(directory)

    def finish(self) -> None:
        self.module.maybe_finalize_async_save(self.arguments, blocking=True)

    def load(self, directory: Path) -> None:
        self.arguments.mcore_model = str(directory)
        loaded = self.module.load_mcore_checkpoint(
            self.arguments, self.training.chunks, self.training.optimizer
        )
        assert loaded == 3


class SkyRL:
    """`MegatronStrategy.save_checkpoint` and `load_checkpoint`."""

    def __init__(self, training: Training, is_async: bool) -> None:
        io = SimpleNamespace(
            makedirs=os.makedirs,
            exists=os.path.exists,
            is_cloud_path=lambda path: False,
            local_work_dir=nullcontext,
        )
        module = run_released(
            "skyrl",
            "skyrl/backends/skyrl_train/distributed/megatron/megatron_strategy.py",
            ("skyrl", "jaxtyping", "transformers", "nvidia_resiliency_ext"),
            {"skyrl.backends.skyrl_train.utils.io": {"io": io}},
        )
        module.AsyncCallsQueue = AsyncCallsQueue  # of nvidia-resiliency-ext, which this machine lacks
        module._async_calls = AsyncCallsQueue()
        owner = module.MegatronStrategy
        self.strategy = owner.__new__(owner)
        self.training = training
        vars(self.strategy).update(
            is_lora=False,
            megatron_config=SimpleNamespace(
                async_dist_ckpt_save=is_async,
                async_save_prestage_to_cpu=True,
                dist_ckpt_optim_fully_reshardable=False,
            ),
            hf_config=None,
            save_hf_configs=lambda *what: None,
            is_rank_0=lambda: dist.get_rank() == 0,
            print=lambda *what: None,
            get_rng_state=lambda: {"step": 7},
            load_rng_state=lambda state: None,
        )

    def save(self, directory: Path) -> None:
        model = SimpleNamespace(actor_module=self.training.chunks)
        self.strategy.save_checkpoint(model, str(directory), dist.get_rank(), self.training.optimizer)

    def finish(self) -> None:
        self.strategy.finalize_pending_saves()

    def load(self, directory: Path) -> None:
        model = SimpleNamespace(actor_module=self.training.chunks)
        self.strategy.load_checkpoint(model, str(directory), self.training.optimizer)


class NeMo:
    """NeMo 2's `MegatronCheckpointIO`, which needs a Megatron-Core before 0.17."""

    def __init__(self, training: Training, is_async: bool) -> None:
        files = {"get_filesystem": lambda path: fsspec.filesystem("file")}
        given = {"lightning.fabric.utilities.cloud_io": files}
        module = run_released("nemo-toolkit", "nemo/lightning/io/pl.py", ("nemo", "lightning"), given)
        module.ckpt_to_weights_subdir = lambda path, is_saving: Path(path, "weights")
        module._fix_tensors_device = lambda state: state  # there is no device
        self.io = module.MegatronCheckpointIO(async_save=is_async, parallel_load=True)
        self.training, self.queue = training, AsyncCallsQueue()

    def save(self, directory: Path) -> None:
        step = {"fit_loop": {"epoch_loop.batch_progress": {"total": {"completed": 3}}}}
        request = self.io.save_checkpoint(self.training.sharded() | {"loops": step}, str(directory))
        if request is not None:
            self.queue.schedule_async_request(request)

    def finish(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)

    def load(self, directory: Path) -> None:
        loaded = self.io.load_checkpoint(str(directory), self.training.sharded(is_loading=True))
        self.training.accept(loaded)


FRAMEWORKS = {"nemo-toolkit": NeMo, "calls": Calls, "verl": Verl, "ms-swift": MsSwift, "skyrl": SkyRL}


def save_swap_load(root: str, name: str, how: str, is_async: bool, folder: str) -> None:
    """Saves with a framework, swaps all weights and state at once, loads, and reports what differs."""
    join()
    os.environ["MEGATRON_DATASTATES_REPORT_FILE"] = str(Path(folder, "saves.jsonl"))
    if how == "enable":
        enable()
    elif how == "switch":
        os.environ["MEGATRON_DATASTATES_ENABLE"] = "1"
    training = trained({})
    truth = digests(training)
    framework = FRAMEWORKS[name](training, is_async)
    framework.save(Path(root))
    swap_everything(training)
    swapped = digests(training)
    framework.finish()
    dist.barrier()
    framework.load(Path(root))
    became = digests(training)
    report(
        folder,
        compared=len(truth),
        swapped=sum(truth[key] != swapped.get(key) for key in truth),
        different=sorted(key for key in truth.keys() | became.keys() if truth.get(key) != became.get(key)),
    )


def trained(layout: Layout) -> Training:
    """Returns a training after one step, whose replicas are equal."""
    training = build(layout, "dp_reshardable", random_values())
    for tensor in (tensor for chunk in training.chunks for tensor in chunk.state_dict().values()):
        if isinstance(tensor, torch.Tensor):
            dist.broadcast(tensor.data, parallel_state.get_data_parallel_src_rank(), data_parallel_group())
    step(training)
    return training


def load_into_another_layout(root: str, layout: Layout, folder: str) -> None:
    """Saves in two ranks of data parallelism, loads in another layout, and reports the refusal."""
    join()
    enable()
    Calls(trained({}), is_async=False).save(Path(root))
    other = Calls(trained(layout), is_async=False)
    error = failure_of(lambda: other.load(Path(root)))
    report(folder, error=error)
