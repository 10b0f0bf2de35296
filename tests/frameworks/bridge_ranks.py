"""Ranks of test_bridge.py: Megatron-Bridge's own training, configured as its users do."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import checkpointing
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import get_dataset_provider, pretrain, runtime_config_update
from megatron.bridge.training.setup import setup
from megatron.bridge.training.state import GlobalState
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training.config.instantiate_utils import target_allowlist
from model_ranks import Training, step
from mutation_ranks import contents
from saving_rank import join, report
from swapping import digests, free_state

from megatron_datastates.config import Options
from megatron_datastates.mcore import enable
from megatron_datastates.mcore.bridge_settings import MANAGER
from megatron_datastates.pipeline.saver_pool import saver_for

ASYNC = {"async_save": True, "async_strategy": "mcore"}

TOKENS, VOCABULARY, STEPS = 32, 128, 6


def local_layers(config: Any) -> Any:
    """Returns a layer without Transformer Engine; a function of this module, so that a config can name it."""
    return get_gpt_layer_local_spec()


def configuration(folder: str, iterations: int, checkpoint: dict[str, Any], sizes: dict[str, int]) -> Any:
    """Returns a configuration of a tiny GPT on synthetic data, which saves after every second step."""
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            seq_length=TOKENS,
            vocab_size=VOCABULARY,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            transformer_layer_spec=local_layers,
            cross_entropy_loss_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            **sizes,
        ),
        train=TrainingConfig(
            train_iters=100, exit_interval=iterations, micro_batch_size=1, global_batch_size=2
        ),
        validation=ValidationConfig(eval_interval=100, eval_iters=0),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, bf16=True, use_distributed_optimizer=True
        ),
        scheduler=SchedulerConfig(
            lr_decay_iters=STEPS,
            lr_warmup_iters=1,
            lr_decay_style="cosine",
            start_weight_decay=0.01,
            end_weight_decay=0.01,
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=False, overlap_param_gather=False
        ),
        dist=DistributedInitConfig(distributed_backend="gloo", use_gloo_process_groups=True),
        dataset=MockGPTDatasetConfig(
            seq_length=TOKENS,
            random_seed=1,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
        ),
        logger=LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=CheckpointConfig(
            save=folder, load=folder, save_interval=2, save_tokenizer_assets=False, **checkpoint
        ),
    )


def train(folder: str, iterations: int, checkpoint: dict[str, Any], sizes: dict[str, int]) -> None:
    """Trains with Bridge's `pretrain`, up to this iteration."""
    pretrain(configuration(folder, iterations, checkpoint, sizes), forward_step)


def differences(left: str, right: str, folder: str) -> None:
    """Reports the keys whose tensors or objects differ between two checkpoints."""
    join()
    one, other = contents(Path(left)), contents(Path(right))
    different = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    report(folder, different=different, keys=len(one))


def save_as_nemo_rl(root: str, how: str, folder: str) -> None:
    """Saves as NeMo-RL's worker does, replaces all weights at once, renames, and loads.

    The calls are those of `MegatronPolicyWorker.save_checkpoint`, `offload_after_refit` and `move_model`
    (nemo_rl/models/policy/workers/megatron_policy_worker.py, at 7ea279a of 2026-08-22), and `os.rename` of
    nemo_rl/utils/checkpoint.py. NeMo-RL waits for the save before it offloads; this does not.
    """
    if how == "enable":
        enable()
    else:
        os.environ["MEGATRON_DATASTATES_ENABLE"] = "1"
    state = GlobalState()
    state.cfg = configuration(root, 100, ASYNC | {"use_persistent_ckpt_worker": False}, {})
    state.cfg.checkpoint.finalize = lambda: None  # which requires the worker; NeMo-RL configures none
    runtime_config_update(state.cfg)
    made = setup(state, get_dataset_provider(state.cfg.dataset))
    training = Training(made.model, made.optimizer, {})
    truth, lazy = {}, []
    for number in (1, 2):
        step(training)
        state.train_state.step = number
        truth = digests(training)
        place = Path(root, f"tmp_step_{number}", "policy", "weights")
        state.cfg.checkpoint.save = str(place)
        checkpointing.maybe_finalize_async_save(state, ckpt_cfg=state.cfg.checkpoint, blocking=True)
        checkpointing.save_checkpoint(
            state=state,
            model=made.model,
            optimizer=made.optimizer,
            opt_param_scheduler=made.scheduler,
            num_floating_point_operations_so_far=0,
            checkpointing_context={},
        )
        lazy.append(saver_for(Options.from_environment(lazy=False))._unfinished[-1].save.plan.lazy_bytes)
        offload_and_reload(training)
        checkpointing.maybe_finalize_async_save(state, ckpt_cfg=state.cfg.checkpoint, blocking=True)
        if dist.get_rank() == 0:
            Path(root, f"tmp_step_{number}").rename(Path(root, f"step_{number}"))
        dist.barrier()
    state.cfg.checkpoint.load = str(Path(root, "step_2", "policy", "weights"))
    checkpointing.load_checkpoint(state, made.model, made.optimizer, made.scheduler, checkpointing_context={})
    became = digests(training)
    different = sorted(key for key in truth.keys() | became.keys() if truth.get(key) != became.get(key))
    report(folder, different=different, compared=len(truth), lazy=lazy)


def offload_and_reload(training: Training) -> None:
    """Offloads the model, as NeMo-RL's `move_model` does, brings it back, and swaps all values."""
    for chunk in training.chunks:
        for buffers in (chunk.buffers, chunk.expert_parallel_buffers):
            for buffer in buffers:
                buffer.offload_to_cpu(move_params=True, move_grads=True)
                buffer.reload_from_cpu(move_params=True, move_grads=True)
        for parameter in chunk.parameters():
            parameter.data.fill_(-7)
    free_state(training)


def make_managers(root: str, folder: str) -> None:
    """Makes managers through Bridge's factory; reports which targets its allow list has, and its refusals."""
    join()
    made = checkpointing.create_checkpoint_manager(CheckpointConfig(save=root, ckpt_format="datastates"))
    allowed = {
        "ours": target_allowlist.is_allowed(MANAGER),
        "another of ours": target_allowlist.is_allowed("megatron_datastates.api.save"),
    }
    bad = {
        "foreign": {"custom_manager_class": "os.path.Manager"},
        "fsdp": {"custom_manager_class": MANAGER, "ckpt_format": "fsdp_dtensor"},
        "both": {"custom_manager_class": "os.path.Manager", "ckpt_format": "datastates"},
    }
    refusals = {}
    for name, fields in bad.items():
        try:
            checkpointing.create_checkpoint_manager(CheckpointConfig(save=root, **fields))
        except Exception as error:
            refusals[name] = str(error)
    report(folder, made=type(made).__name__, allowed=allowed, **refusals)
