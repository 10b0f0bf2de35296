"""One rank of a tiny pretraining that records fingerprints of its state: runs in forked ranks.

What belongs here: hooking `megatron.training` to see model, optimizer and losses, and digesting
them. What does not: launching and comparing (`tiny.py`). Digests are SHA-256 of a tensor's bytes,
floats are written in hex, so that two runs compare bit for bit.
"""

import contextlib
import functools
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frozen
import hybrid_layers
import latent_attention
import mimo_optimizer
import mutations
import numpy
import pretrain_tiny
import psutil
import torch
import torch._dynamo  # as the tokenizer below: here once, because each rank would spend 2 s on importing them
import torch.distributed.tensor
from megatron.core import tensor_parallel
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.training import get_args
from megatron.training import training as loop

with contextlib.suppress(ImportError):  # not in every release
    import megatron.core.tokenizers.text.text_tokenizer  # noqa: F401

Digests = dict[str, str]
PROVIDED = "TINY_MODEL_PROVIDER"  # an environment variable
WAITS = (
    "TINY_WAITS"  # a step and a file: in that step, ranks wait until the file exists; without one, forever
)
FAULTS = "MEGATRON_DATASTATES_FAULTS"
SETTLED = ("async_save", "async_strategy", "use_persistent_ckpt_worker", "ckpt_assume_constant_structure")


class Recorder:
    """Records the state of Megatron's training loop by wrapping its set-up and its step.

    The functions that save and load are not wrapped: they are what is tested.
    """

    def __init__(self) -> None:
        self._working: tuple[Any, Any, Any] | None = None
        self.begun: dict[str, Any] = {}
        self.states: dict[str, Digests] = {}
        self.children: set[str] = set()
        self.released_after: list[int] = []  # numbers of steps

    def attach(self) -> None:
        set_up, take_step = loop.setup_model_and_optimizer, loop.train_step
        release = torch.cuda.empty_cache

        def empty_cache() -> None:
            self.released_after.append(len(self.states))
            release()

        def setup_model_and_optimizer(*args: Any, **options: Any) -> Any:
            self._working = set_up(*args, **options)
            self.begun = {"iteration": get_args().iteration, "state": self.state()}
            return self._working

        def train_step(*args: Any, **options: Any) -> Any:
            results = take_step(*args, **options)
            step, _, file = os.environ.get(WAITS, "").partition(" ")
            while str(get_args().curr_iteration + 1) == step and not (file and Path(file).exists()):
                if not file:  # all ranks do so until they are killed
                    loop.maybe_finalize_async_save(blocking=False)
                time.sleep(0.05)
            losses = {f"loss {name}": _text(value) for name, value in results[0].items()}
            self.states[f"step {get_args().curr_iteration + 1}"] = self.state() | losses
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has ended
                    self.children.add(child.name())
            return results

        loop.setup_model_and_optimizer = setup_model_and_optimizer
        loop.train_step = train_step
        torch.cuda.empty_cache = empty_cache

    def working(self) -> tuple[Any, Any, Any]:
        """Returns the model chunks, the optimizer and the scheduler."""
        assert self._working is not None
        return self._working

    def state(self) -> Digests:
        """Returns a digest of everything that a resumed run must restore, by name."""
        model, optimizer, scheduler = self.working()
        described = {"scheduler": _text(scheduler.state_dict()), **_generators()}
        for index, chunk in enumerate(model):
            for name, value in [*chunk.named_parameters(), *chunk.named_buffers()]:
                described[f"model {index} {name}"] = _text(value)
        return described | dict(_optimizer_state(optimizer))

    def record(self) -> dict[str, Any]:
        """Returns all that was recorded, and the state and the consumed samples at the end."""
        end = self.state() | {"consumed samples": str(get_args().consumed_train_samples)}
        moment = f"end, after step {get_args().curr_iteration + 1}"
        facts = {
            "children": sorted(self.children),
            "device memory released after": [step for step in self.released_after if step > 0],
            "our modules": sorted(name for name in sys.modules if name.startswith("megatron_datastates")),
            "arguments": {name: getattr(get_args(), name, None) for name in SETTLED},
        }
        return {"begun": self.begun, "states": self.states | {moment: end}, "facts": facts}


def _generators() -> Digests:
    return {
        "generator random": _text(repr(random.getstate())),
        "generator numpy": _text(repr(numpy.random.get_state(legacy=False))),
        "generator torch": _text(torch.get_rng_state()),
        "generator tracker": _text(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def _optimizer_state(optimizer: Any) -> Iterator[tuple[str, str]]:
    """Yields each inner optimizer's options (the step is one), main parameters and their moments, and the
    loss scaler."""
    for link, chained in enumerate(mutations.links(optimizer)):
        if getattr(chained, "grad_scaler", None) is not None:
            yield f"optimizer {link} loss scaler", _text(chained.grad_scaler.state_dict())
        inner = chained.optimizer
        for index, group in enumerate(inner.param_groups):
            name = f"optimizer {link}.{index}"
            options = {key: value for key, value in group.items() if key != "params"}
            yield f"{name} options", _text(options)
            for position, param in enumerate(group["params"]):
                yield f"{name}.{position} param", _text(param)
                for key, value in inner.state[param].items():
                    yield f"{name}.{position} {key}", _text(value)


def _text(value: Any) -> str:
    """Describes a value such that equal texts mean equal bits; of a DTensor, this rank's part."""
    if isinstance(value, torch.distributed.tensor.DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        copied = value.detach().clone(memory_format=torch.contiguous_format)  # what NumPy saw never resizes
        data = copied.reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    if isinstance(value, dict):
        return "; ".join(f"{key}={_text(value[key])}" for key in sorted(value, key=str))
    if isinstance(value, float):
        return value.hex()
    text = str(value)
    return text if len(text) < 100 else hashlib.sha256(text.encode()).hexdigest()


def _provide_model() -> None:
    """Lets Megatron build the model as before 0.19: only there does it make buckets for Muon."""
    configure = pretrain_tiny._configure
    pretrain_tiny._configure = lambda describe_model: configure(describe_model=False)
    pretrain_tiny.pretrain = functools.partial(
        pretrain_tiny.pretrain, model_provider=pretrain_tiny.build_model
    )


def main(arguments: list[str], folder: str) -> None:
    """Pretrains with `arguments` and writes FOLDER/rankN.json, unless it fails or trains no step.

    The environment variable TINY_FAULTS_OF_RANK_N is the fault plan of rank N only. TINY_VARIABLE_OF_RANK_N
    is another variable of its environment, as NAME=VALUE.
    """
    sys.argv = ["pretrain_tiny.py", *arguments]
    own = os.environ.get(f"TINY_FAULTS_OF_RANK_{os.environ['RANK']}")
    if own is not None:
        os.environ[FAULTS] = own
    name, _, value = os.environ.get(f"TINY_VARIABLE_OF_RANK_{os.environ['RANK']}", "").partition("=")
    if name:
        os.environ[name] = value
    frozen.install()
    # NCCL gathers parts of unequal sizes, gloo does not.
    LayerWiseDistributedOptimizer.allgather_params = LayerWiseDistributedOptimizer.broadcast_params
    if hybrid_layers.CHOSEN in os.environ:
        pretrain_tiny.build_model = hybrid_layers.build_model
    if PROVIDED in os.environ or hybrid_layers.CHOSEN in os.environ:
        _provide_model()
    if latent_attention.CHOSEN in os.environ:
        latent_attention.install(fused=os.environ[latent_attention.CHOSEN] == "fused")
    if mimo_optimizer.CHOSEN in os.environ:
        mimo_optimizer.install()
    recorder = Recorder()
    mutations.install(recorder.working)
    recorder.attach()
    code: Any = 0
    try:
        pretrain_tiny.main()
    except SystemExit as stop:
        code = stop.code
    if not code and recorder.states:
        name = f"rank{torch.distributed.get_rank()}.json"
        Path(folder, name).write_text(json.dumps(recorder.record(), indent=1))
    sys.exit(code)
