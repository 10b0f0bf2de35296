"""Changes of model and optimizer between two saves of a tiny pretraining, which a prepared save must notice.

Belongs here: the changes. An environment variable names one and the step after which it is made, so that any
run of tests/support/tiny.py can be one of these.
"""

import copy
import dataclasses
import importlib
import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.training import checkpointing, get_args
from megatron.training import training as loop
from torch.optim.optimizer import register_optimizer_step_post_hook

MUTATION = "TINY_MUTATION"  # name:iteration, or name:iteration:rank

Mutate = Callable[[Any, Any], None]  # of the model chunks and the optimizer
MUTATIONS: dict[str, Mutate] = {}
KEPT: list[Any] = []


def mutation(function: Mutate) -> Mutate:
    MUTATIONS[function.__name__] = function
    return function


def links(optimizer: Any) -> list[Any]:
    """Returns the optimizers of a chain, of chains of them, or this one."""
    if not hasattr(optimizer, "chained_optimizers"):
        return [optimizer]
    return [link for one in optimizer.chained_optimizers for link in links(one)]


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Returns the torch optimizers of a Megatron optimizer."""
    return [one.optimizer for one in links(optimizer)]


@mutation
def moved_data(model: Any, optimizer: Any) -> None:
    """Gives parameters (but not tied ones) and main parameters other memory, with other values."""
    for parameter in model[0].decoder.parameters():
        parameter.data = parameter.data.clone() + 1
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone() + 2


@mutation
def replaced_state(model: Any, optimizer: Any) -> None:
    """Replaces a moment of the first parameter."""
    for inner in inner_optimizers(optimizer):
        state = next(iter(inner.state.values()))
        name = next(name for name in state if name != "step")
        state[name] = state[name] + 1


@mutation
def replaced_main_parameters(model: Any, optimizer: Any) -> None:
    """Replaces the first main parameter of each group, with its state."""
    for one in links(optimizer):
        for group, mains in zip(one.optimizer.param_groups, one.fp32_from_float16_groups, strict=True):
            if mains:
                new = mains[0].clone() + 1
                at = next(at for at, param in enumerate(group["params"]) if param is mains[0])
                one.optimizer.state[new] = one.optimizer.state.pop(mains[0])
                mains[0] = group["params"][at] = new


@mutation
def freed_state(model: Any, optimizer: Any) -> None:
    """Replaces moments, as a program does that moves them elsewhere: nothing may hold the old ones."""
    for inner in inner_optimizers(optimizer):
        for state in inner.state.values():
            before = weakref.ref(state["exp_avg"])
            state["exp_avg"] = state["exp_avg"].clone()
            assert before() is None, "something still holds the old moments"


@mutation
def replaced_parameter(model: Any, optimizer: Any) -> None:
    """Replaces a parameter of the model by a new one."""
    norm = model[0].decoder.final_layernorm if model[0].post_process else None
    if norm is not None:
        norm.weight = torch.nn.Parameter(norm.weight.detach() + 1)


@mutation
def reloaded_model(model: Any, optimizer: Any) -> None:
    """Loads other values into the same parameters, then assigns new ones."""
    state = {name: value + 1 for name, value in model[0].state_dict().items() if value is not None}
    model[0].load_state_dict(state, strict=False)
    model[0].load_state_dict(
        {name: value.clone() for name, value in state.items()}, strict=False, assign=True
    )


@mutation
def frozen_parameter(model: Any, optimizer: Any) -> None:
    """Changes requires_grad, and a value right afterwards."""
    weight = model[0].decoder.layers[0].mlp.linear_fc1.weight
    weight.requires_grad_(False)
    weight.data += 1


@mutation
def new_option(model: Any, optimizer: Any) -> None:
    """Changes plain values of a parameter group."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            group["eps" if "eps" in group else "momentum"] = 1.5e-8  # the scheduler sets others at a load


def _around_state_dicts(change: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Wraps `generate_state_dict`, as programs do: `change` gets the model chunks and a call of it."""
    original = checkpointing.generate_state_dict

    def generate_state_dict(args: Any, model: Any, *rest: Any, **named: Any) -> Any:
        return change(model, lambda: original(args, model, *rest, **named))

    checkpointing.generate_state_dict = generate_state_dict


@mutation
def swapped_meanwhile(model: Any, optimizer: Any) -> None:
    """Has other values in the model while Megatron makes state dicts, which hold Parameters."""

    def swapped(chunks: Any, make: Callable[[], Any]) -> Any:
        parameters = list(chunks[0].decoder.parameters())
        own = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.clone() + 1
        state = make()
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data
        return state

    _around_state_dicts(swapped)


def _with_more(state: Any) -> Any:
    key = f"more{torch.distributed.get_rank()}"
    return state | {key: ShardedTensor.from_rank_offsets(key, torch.ones(2))}


@mutation
def more_state(model: Any, optimizer: Any) -> None:
    """Adds a tensor to every state dict from now on."""
    _around_state_dicts(lambda chunks, make: _with_more(make()))


@mutation
def wandering_state(model: Any, optimizer: Any) -> None:
    """Adds a tensor to every state dict from now on, of rank 0 the first time and of rank 1 from then on."""
    calls = itertools.count()

    def with_it(state: Any) -> Any:
        here = torch.distributed.get_rank() == min(next(calls), 1)
        return state | {"more": ShardedTensor.from_rank_offsets("more", torch.ones(2))} if here else state

    _around_state_dicts(lambda chunks, make: with_it(make()))


def _before_saves(change: Callable[[Any], Any]) -> None:
    """Wraps `dist_checkpointing.save`: `change` gets the state dict that Megatron has made."""
    original = checkpointing.dist_checkpointing.save

    def save(state: Any, *rest: Any, **named: Any) -> Any:
        return original(change(state), *rest, **named)

    checkpointing.dist_checkpointing.save = save


@mutation
def filtered_late(model: Any, optimizer: Any) -> None:
    """Removes all that is no tensor from the model's part of what the next save is given."""
    calls = itertools.count()

    def filtered(state: Any) -> Any:
        if next(calls):
            return state
        kept = {name: item for name, item in state["model"].items() if not isinstance(item, ShardedObject)}
        return state | {"model": kept}

    _before_saves(filtered)


@mutation
def weights_first(model: Any, optimizer: Any) -> None:
    """Saves the weights alone in the next save, and everything from then on."""
    calls = itertools.count()

    def without_states(state: Any) -> Any:
        if next(calls):
            return state
        return {name: item for name, item in state.items() if name != "optimizer"}

    _before_saves(without_states)


@mutation
def added_late(model: Any, optimizer: Any) -> None:
    """Adds a tensor to what every save from now on is given."""
    _before_saves(_with_more)


@mutation
def moved_late(model: Any, optimizer: Any) -> None:
    """Moves parameters (but not tied ones) after Megatron has made a state dict."""

    def moved(state: Any) -> Any:
        for parameter in model[0].decoder.parameters():
            before, parameter.data = parameter.data, parameter.data.clone()
            before.fill_(9)
        return state

    _before_saves(moved)


_BY_PLACEMENT = """
def sharded_state_dict(self, *args, **options):
    own = self.local_experts
    self.local_experts = torch.nn.ModuleList([own[place] for place in self.placement])
    try:
        return megatrons(self, *args, **options)
    finally:
        self.local_experts = own
"""


@mutation
def wandering_experts(model: Any, optimizer: Any) -> None:
    """Exchanges the places of local experts every other step, by an attribute, as a fork of Megatron may."""
    from megatron.core.transformer.moe import experts

    experts.megatrons = experts.SequentialMLP.sharded_state_dict
    exec(_BY_PLACEMENT, vars(experts))  # as if it were written there
    experts.SequentialMLP.sharded_state_dict = experts.sharded_state_dict
    found = [one for one in model[0].modules() if isinstance(one, experts.SequentialMLP)]
    assert found

    def place(*_: Any) -> None:
        for one in found:
            one.placement = [0, 1] if get_args().curr_iteration // 2 % 2 else [1, 0]

    place()
    register_optimizer_step_post_hook(place)


@mutation
def distributed_weights(model: Any, optimizer: Any) -> None:
    """Distributes saves by the weights alone, as main's cache of a load without the optimizer has it."""
    original = fully_parallel.determine_main_replica_uniform_distribution

    def determine(state: Any, *rest: Any, **named: Any) -> Any:
        weights = {name: item for name, item in state.items() if name != "optimizer"}
        return original(weights, *rest, **named)

    fully_parallel.determine_main_replica_uniform_distribution = determine


@mutation
def replaced_optimizer(model: Any, optimizer: Any) -> None:
    """Replaces an optimizer in the chain, and keeps the old one."""
    KEPT.append(optimizer.chained_optimizers[0])
    optimizer.chained_optimizers[0] = copy.copy(KEPT[0])


@mutation
def failing_gather(model: Any, optimizer: Any) -> None:
    """Memory is missing in a collective call, as those that make a layer-wise optimizer's state dict."""
    original = torch.distributed.all_gather_object

    def fail(*args: Any, **kwargs: Any) -> None:
        torch.distributed.all_gather_object = original
        raise MemoryError("no memory to gather")

    torch.distributed.all_gather_object = fail


@mutation
def switched_off(model: Any, optimizer: Any) -> None:
    """Switches prepared saves off."""
    from megatron_datastates.mcore.training import loop as ours

    ours._options = dataclasses.replace(ours._options, prepared=False)


@mutation
def reloaded_module(model: Any, optimizer: Any) -> None:
    """Reloads Megatron's module, which takes our strategy out of it."""
    importlib.reload(checkpointing)


@mutation
def replaced_strategy(model: Any, optimizer: Any) -> None:
    """Puts a strategy in place of ours, and forgets the one that Megatron has made."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    checkpointing.TorchDistSaveShardedStrategy = TorchDistSaveShardedStrategy


@mutation
def replaced_queue(model: Any, optimizer: Any) -> None:
    """Takes our hook out of Megatron's queue of asynchronous calls."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    AsyncCallsQueue.schedule_async_request = AsyncCallsQueue.schedule_async_request.__wrapped__


def install(working: Callable[[], Any]) -> None:
    """Does what the environment asks for.

    Args:
        working: returns model chunks (unwrapped), optimizer and scheduler.
    """
    if MUTATION not in os.environ:
        return
    name, after, *rank = os.environ[MUTATION].split(":")
    take_step = loop.train_step

    def train_step(*args: Any, **options: Any) -> Any:
        results = take_step(*args, **options)
        here = not rank or rank[0] == os.environ["RANK"]
        if here and get_args().curr_iteration + 1 == int(after):
            model, optimizer, _ = working()
            MUTATIONS[name](loop.unwrap_model(model), optimizer)
        return results

    loop.train_step = train_step
