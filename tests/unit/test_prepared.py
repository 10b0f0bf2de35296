"""What a prepared save relies on: surveys of modules, extra states, views, and marks that nobody can save.

Real optimizers and loops: tests/e2e/test_prepared.py.
"""

import copy
import dataclasses
import enum
import functools
import gc
import io
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.training import checkpointing

from megatron_datastates.engine import exchange
from megatron_datastates.errors import SaveFailedError
from megatron_datastates.mcore import fences
from megatron_datastates.mcore.save import prepared, preparing, rows
from megatron_datastates.mcore.save.attributes import UnprovableError
from megatron_datastates.mcore.save.extra_states import extra_states
from megatron_datastates.mcore.save.mapping import ShardedStateProvider
from megatron_datastates.mcore.save.marks import MARK, Mark
from megatron_datastates.mcore.save.mutability import nothing_promised
from megatron_datastates.mcore.save.survey import Survey, is_megatrons_alone
from megatron_datastates.providers.base import Mutability, Tensors


def no_optimizer() -> Any:
    chain = ChainedOptimizer.__new__(ChainedOptimizer)
    chain.chained_optimizers = []
    return chain


class Kind(enum.Enum):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    """Of a model, as Megatron's."""

    experts: int = 2
    names: tuple[str, ...] = ("a", "b")
    callback: Any = len


def make() -> torch.nn.Module:
    named = torch.nn.ModuleDict({"step": torch.nn.Linear(2, 2)})  # the name of a value in optimizers' states
    named.register_buffer("padding", torch.zeros(3))
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2), named)
    model[0].register_buffer("kept", torch.zeros(3))
    model[0].register_buffer("dropped", torch.zeros(3), persistent=False)
    model[0].register_buffer("shared_name", torch.zeros(2), persistent=False)
    model[1].register_buffer("shared_name", torch.zeros(2))
    model[0].layer_number = 1
    model[0].current_microbatch = 0
    model[1].experts = {"first": [0, 1], "second": 2}  # no plain attribute
    model[2].experts = [0, 1]
    model[2].config = model[3].config = Config()
    model[3].seen = 0
    model[0].place = None
    model[3].places = {"first": [(0, 1)], "second": [None, 2], "third": {1: {2}}}
    model[3].kind, model[3].count, model[3].size = Kind.A, np.int64(3), torch.Size([4, 3])
    model[3].dtype, model[3].rate = torch.bfloat16, math.nan
    model[1].config = types.SimpleNamespace(experts=3, place=None)
    model[2].many = [0] * 2000  # too many to look at in every save
    model[2]._register_state_dict_hook(torch.nn.init.zeros_)  # a function that is trusted
    model[2].weight.requires_grad_(False)
    return model


def set_data(model: Any) -> None:
    model[0].weight.data = torch.ones(6, 4)


def set_values(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.add_(1)


def freeze(model: Any) -> None:
    model[0].weight.requires_grad_(False)


def transpose_in_memory(model: Any) -> None:
    model[0].weight.data = torch.ones(4, 6).t()


def swap_persistence(model: Any) -> None:
    model[0].register_buffer("kept", model[0].kept, persistent=False)
    model[0].register_buffer("dropped", model[0].dropped)


def replace_hook(model: Any) -> None:
    model[2]._state_dict_hooks.clear()
    model[2].register_state_dict_post_hook(lambda *_: None)


def move_hook(model: Any) -> None:
    model[1]._state_dict_hooks.update([model[2]._state_dict_hooks.popitem()])


class Quantized(torch.nn.Parameter):
    def dequantize(self) -> Any:
        return self + 1


CHANGES: list[Callable[[Any], object]] = [
    lambda model: setattr(model[0].weight, "__class__", Quantized),
    lambda model: model.append(torch.nn.Linear(2, 2)),
    lambda model: model[0].register_buffer("new", torch.zeros(1)),
    lambda model: model[0].register_buffer("kept", torch.zeros(3)),
    lambda model: model[0].register_buffer("kept", model[0].kept, persistent=False),
    lambda model: model[0]._buffers.pop("kept"),
    lambda model: setattr(model[2], "bias", torch.nn.Parameter(torch.zeros(2))),
    lambda model: setattr(model[2], "bias", None),
    lambda model: model.__setitem__(1, torch.nn.BatchNorm1d(6)),
    lambda model: setattr(model[0].weight, "data", torch.ones(6, 5)),
    lambda model: setattr(model[0].weight, "data", torch.ones(6, 4, dtype=torch.float16)),
    lambda model: model[0].kept.resize_(2),
    transpose_in_memory,
    lambda model: model[2].weight.requires_grad_(True),
    lambda model: model[0].register_state_dict_post_hook(lambda *_: None),
    lambda model: model[0].register_state_dict_pre_hook(lambda *_: None),
    lambda model: setattr(model[0], "sharded_state_dict", lambda: {}),
    lambda model: setattr(model[0], "state_dict", lambda: {}),
    lambda model: setattr(model[0], "_save_to_state_dict", lambda: {}),
    lambda model: setattr(model[0], "__class__", torch.nn.Bilinear),
    lambda model: setattr(model[0].weight, "data", torch._neg_view(torch.ones(6, 4))),
    lambda model: model._modules.__setitem__("0", model._modules.pop("0")),
    lambda model: model[2]._parameters.update(again=model[2]._parameters.pop("bias")),
    lambda model: model[2]._buffers.update(bias=model[2]._parameters.pop("bias")),
    swap_persistence,
    replace_hook,
    move_hook,
    lambda model: setattr(model[3], "step", torch.nn.Linear(2, 2)),
    lambda model: model[3].register_buffer("padding", torch.zeros(3)),
    lambda model: model[3].__dict__.pop("_buffers"),
    lambda model: setattr(model[0], "layer_number", 2),
    lambda model: delattr(model[0], "layer_number"),
    lambda model: setattr(model[0], "another", None),
    lambda model: model[2].experts.reverse(),
    lambda model: setattr(model[2], "experts", [0, 1, 2]),
    lambda model: setattr(model[2], "experts", torch.zeros(2)),
    lambda model: setattr(model[3].config, "experts", 4),
    lambda model: setattr(model[3].config, "names", ("a", "c")),
    lambda model: setattr(model[3], "seen", False),  # equal, and written in another way
    lambda model: setattr(model[1].config, "place", 3),
    lambda model: model[3].places["first"].append((2, 3)),
    lambda model: model[3].places["second"].__setitem__(1, 7),
    lambda model: setattr(model[3], "kind", Kind.B),
    lambda model: setattr(model[3], "count", np.int64(4)),
    lambda model: setattr(model[3], "size", torch.Size([3, 4])),
    lambda model: setattr(model[3], "dtype", torch.float16),
    lambda model: setattr(model[1].config, "experts", 4),
    lambda model: delattr(model[1], "config"),
    lambda model: model[1].register_buffer("shared_name", torch.zeros(2)),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_survey_notices_every_change_of_structure(change: Callable[[Any], object]) -> None:
    model = make()
    survey = Survey([model], no_optimizer())
    survey.tensors_if_unchanged(no_optimizer())
    change(model)
    with pytest.raises(UnprovableError):
        survey.tensors_if_unchanged(no_optimizer())


def test_the_attribute_that_has_changed_is_named() -> None:
    model = make()
    survey = Survey([model], no_optimizer())
    model[3].places["second"][1] = 3
    with pytest.raises(UnprovableError, match=r"^the attribute places of a ModuleDict has changed$"):
        survey.tensors_if_unchanged(no_optimizer())
    survey = Survey([model], no_optimizer())
    model[3].weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(UnprovableError, match=r"^a parameter, .* of a ModuleDict was added"):  # not `rate`
        survey.tensors_if_unchanged(no_optimizer())


def replace_what_is_not_stored(model: Any) -> None:
    model[0].dropped = model[0].dropped + 1


def set_what_passes(model: Any) -> None:
    model.eval()
    model[0].current_microbatch = 7
    model[0].place = torch.zeros(1)  # such as a part of the pass that is under way
    model[2].config.callback = print  # not plain
    model[2].experts, model[2].many[5] = [0, 1], 1
    model[3].places = copy.deepcopy(model[3].places)


@pytest.mark.parametrize(
    "change", [set_data, set_values, freeze, replace_what_is_not_stored, set_what_passes]
)
def test_other_memory_and_other_values_are_no_change_of_structure(change: Callable[[Any], None]) -> None:
    model = make()
    survey = Survey([model], no_optimizer())
    change(model)
    tensors, described = survey.tensors_if_unchanged(no_optimizer())
    assert any(tensor is model[0].weight for tensor in tensors)
    assert described is None or described.addresses.tolist() == [tensor.data_ptr() for tensor in tensors]


def test_memory_that_moves_between_the_two_looks_is_found_where_it_is_now() -> None:
    model = make()
    survey = Survey([model], no_optimizer())
    found = survey.tensors_if_unchanged(no_optimizer())
    set_data(model)
    tensors, described = survey.found_again(found)
    assert tensors is found.tensors
    assert described is None or described.addresses.tolist() == [tensor.data_ptr() for tensor in tensors]
    if described is not None:
        assert [storage.data_ptr() for storage in described.storages] == [
            tensor.untyped_storage().data_ptr() for tensor in tensors
        ]


@pytest.mark.parametrize("shape", [(3, 2), (12,)])
def test_another_shape_between_the_two_looks_is_noticed(shape: tuple[int, ...]) -> None:
    model = make()
    survey = Survey([model], no_optimizer())
    found = survey.tensors_if_unchanged(no_optimizer())
    model[0].weight.data = model[0].weight.data.reshape(-1)[: math.prod(shape)].view(shape)
    with pytest.raises(UnprovableError, match="another shape"):
        survey.found_again(found)


def test_tensors_are_located_only_if_they_are_as_described() -> None:
    tensors = [torch.zeros(4), torch.nn.Parameter(torch.ones(2, 3))]
    described, types = exchange.describe(tensors), list(map(type, tensors))
    if described is None:
        pytest.skip("this torch has no exchange API")
    facts, known = described.facts, described.addresses
    tensors[0].data = torch.zeros(4)
    found = exchange.located(tensors, types, facts, known)
    assert found is not None and found.facts is facts
    assert found.addresses.tolist() == [tensor.data_ptr() for tensor in tensors]
    assert [one.data_ptr() for one in found.storages] == found.addresses.tolist()
    for others in (
        [tensors[0].view(torch.int32), tensors[1]],
        tensors[:1],
        [*tensors, tensors[0]],
        tensors[::-1],
        [torch._neg_view(tensors[0]), tensors[1]],
    ):
        assert exchange.located(others, types, facts, known) is None
        assert exchange.located(others, list(map(type, others)), facts, known) is None
    assert exchange.located([tensors[0], tensors[1].detach()], types, facts, known) is None
    assert exchange.located(tensors, types, facts, known[:1]) is None


def test_complex_tensors_are_not_located_as_each_may_be_a_conjugated_view() -> None:
    tensors = [torch.zeros(4, dtype=torch.complex64)]
    described = exchange.describe(tensors)
    if described is None:
        pytest.skip("this torch has no exchange API")
    assert exchange.located(tensors, [torch.Tensor], described.facts, described.addresses) is None


def test_a_complex_tensor_that_becomes_a_conjugated_view_is_noticed() -> None:
    """Dtype, shape, strides and memory are what they were; the values in that memory are not."""
    model = make()
    model.register_buffer("phases", torch.zeros(4, dtype=torch.complex64))
    survey = Survey([model], no_optimizer())
    survey.tensors_if_unchanged(no_optimizer())
    model.phases.data = model.phases.data.conj()
    with pytest.raises(UnprovableError, match="a negated or conjugated view"):
        survey.tensors_if_unchanged(no_optimizer())


def test_parameters_that_state_dicts_gather_over_ranks_cannot_be_prepared() -> None:
    model = make()
    model[0].weight.is_gtp_weight_remat = True
    with pytest.raises(UnprovableError, match="gather parameters over ranks"):
        Survey([model], no_optimizer())


def test_a_look_asks_only_tensors_that_have_moved_what_releases_the_gil(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch does for `is_neg`; another thread then keeps the GIL for milliseconds, once for each tensor."""
    model = make()
    survey = Survey([model], no_optimizer())
    if survey._addresses is None:
        pytest.skip("this torch has no exchange API")
    asked: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "is_neg", asked.append)
    survey.tensors_if_unchanged(no_optimizer())
    assert asked == []
    set_data(model)
    with pytest.raises(UnprovableError):  # it has answered None, which is not False
        survey.tensors_if_unchanged(no_optimizer())
    assert any(tensor is model[0].weight for tensor in asked)
    monkeypatch.undo()
    survey.tensors_if_unchanged(no_optimizer())
    monkeypatch.setattr(torch.Tensor, "is_neg", asked.append)
    asked.clear()
    survey.tensors_if_unchanged(no_optimizer())
    assert asked == [], "what has moved once is known there"


def test_memory_that_was_freed_since_the_look_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fences.install()
    model = make()
    preparation = prepared.Preparation.__new__(prepared.Preparation)
    preparation.survey = Survey([model], no_optimizer())
    monkeypatch.setattr(prepared, "is_megatrons_alone", lambda: True)
    save = prepared.ThinSave(preparation, leaves_out=False)
    save.require_unchanged({"optimizer": no_optimizer()})
    found = save._current
    assert save._found_again() is found
    model[0].kept.untyped_storage().resize_(0)
    again = save._found_again()
    assert again is not found
    if again.described is not None:
        freed = [tensor is model[0].kept for tensor in again.tensors].index(True)
        assert again.described.addresses[freed] == 0


def test_memory_that_another_thread_frees_during_the_look_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fences.install()
    preparation = prepared.Preparation.__new__(prepared.Preparation)
    model = make()
    preparation.survey = Survey([model], no_optimizer())
    look = preparation.survey.tensors_if_unchanged

    def look_beside_another(optimizer: Any) -> Any:
        found = look(optimizer)
        torch.zeros(4).untyped_storage().resize_(0)
        return found

    monkeypatch.setattr(prepared, "is_megatrons_alone", lambda: True)
    monkeypatch.setattr(preparation.survey, "tensors_if_unchanged", look_beside_another)
    save = prepared.ThinSave(preparation, leaves_out=False)
    save.require_unchanged({"optimizer": no_optimizer()})
    assert save._found_again() is not save._current and model is not None


def callers(*homes: str, name: str = "save_checkpoint") -> Callable[[], bool]:
    """Returns a function that asks is_megatrons_alone through functions of these modules, last one first."""
    ask: Callable[[], bool] = is_megatrons_alone
    for number, home in enumerate(homes):
        called = name if number + 1 == len(homes) else "called"
        scope: dict[str, Any] = {"__name__": home, "ask": ask}
        exec(f"def {called}():\n    return ask()", scope)
        ask = scope[called]
    return ask


SAVING = "megatron.training.checkpointing"


@pytest.mark.parametrize(
    ("ask", "is_alone"),
    [
        (callers(SAVING), True),
        (callers("megatron_datastates.pipeline", "megatron.core.dist_checkpointing", SAVING), True),
        (callers("torch.utils", "someone.else", SAVING), False),
        (callers("megatron.core.utils", "megatronic", SAVING), False),
        (callers("megatron.core.utils", SAVING, name="load_checkpoint"), False),
        (callers("megatron.core.utils", "megatron.training.training", name="save_checkpoint"), False),
        (callers("megatron.core.utils"), False),
    ],
)
def test_code_of_others_between_a_save_and_its_strategy_is_noticed(
    ask: Callable[[], bool], is_alone: bool
) -> None:
    assert ask() is is_alone


def test_other_strides_of_the_same_memory_are_noticed_between_the_two_looks() -> None:
    model = make()
    with torch.no_grad():
        model[0].weight.data = torch.zeros(4, 4)
    survey = Survey([model], no_optimizer())
    found = survey.tensors_if_unchanged(no_optimizer())
    model[0].weight.data = model[0].weight.data.t()
    with pytest.raises(UnprovableError, match="memory layout"):
        survey.found_again(found)


def test_a_method_replaced_in_a_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    survey = Survey([make()], no_optimizer())
    model = make()
    survey = Survey([model], no_optimizer())
    monkeypatch.setattr(torch.nn.Linear, "state_dict", lambda self, *args, **kwargs: {})
    with pytest.raises(UnprovableError, match="method"):
        survey.tensors_if_unchanged(no_optimizer())


def test_a_survey_keeps_nothing_alive() -> None:
    model = make()
    survey = Survey([model], no_optimizer())
    del model
    gc.collect()
    with pytest.raises(UnprovableError, match="gone"):
        survey.tensors_if_unchanged(no_optimizer())


class Own(torch.nn.Linear):
    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        return {}


class Hooked(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_post_hook(lambda *_: None)


class HookedBefore(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_pre_hook(lambda *_: None)


def overridden() -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.state_dict = lambda: {}  # type: ignore[assignment,method-assign]
    return module


class Decorated(torch.nn.Linear):
    @functools.wraps(torch.nn.Linear.state_dict)  # copies `__module__`, too
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {}


def set_on_one() -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.state_dict = types.MethodType(torch.nn.Linear.state_dict, module)  # may be another one later
    return module


@pytest.mark.parametrize(
    "module", [lambda: Own(2, 2), Hooked, HookedBefore, overridden, set_on_one, lambda: Decorated(2, 2)]
)
def test_code_that_nobody_knows_is_not_trusted(module: Callable[[], Any]) -> None:
    with pytest.raises(UnprovableError, match="may change the state dict"):
        Survey([torch.nn.Sequential(module())], no_optimizer())


def chain_of(*optimizers: Any) -> Any:
    chain = no_optimizer()
    chain.chained_optimizers += optimizers
    return chain


def test_an_optimizer_that_joins_the_chain_is_noticed() -> None:
    model = make()
    survey = Survey([model], no_optimizer())
    with pytest.raises(UnprovableError, match="an optimizer was added"):
        survey.tensors_if_unchanged(chain_of(DistributedOptimizer.__new__(DistributedOptimizer)))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DistributedOptimizer, "sharded_param_state_dp_reshardable"),
        (DistributedOptimizer, "sharded_state_dict"),
        (DistributedOptimizer, "state_dict"),
        (ChainedOptimizer, "sharded_state_dict"),
    ],
)
def test_a_method_of_an_optimizer_that_somebody_wraps_is_not_trusted(
    kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, without_parameters = getattr(kind, name), DistributedOptimizer.__new__(DistributedOptimizer)
    without_parameters.is_stub_optimizer = True
    chain = chain_of(without_parameters)
    survey = Survey([make()], chain)
    monkeypatch.setattr(kind, name, functools.wraps(original)(lambda *_: {}))
    with pytest.raises(UnprovableError, match=f"may change the state dict of {kind.__name__}"):
        Survey([make()], chain)
    with pytest.raises(UnprovableError):
        survey.tensors_if_unchanged(chain)


def test_a_method_set_on_a_chain_of_optimizers_is_not_trusted() -> None:
    chain = no_optimizer()
    chain.sharded_state_dict = lambda: {}
    with pytest.raises(UnprovableError, match="one ChainedOptimizer has its own"):
        Survey([make()], chain)


class Extra(torch.nn.Linear):
    """Has a value that changes."""

    scale: Any = None

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


def extra(key: str, value: Any) -> dict[str, Any]:
    return {key: ShardedObject(key, value, (1,), (0,))}


@pytest.mark.parametrize("value", [None, torch.arange(3.0), io.BytesIO(b"scales")])
def test_extra_states_are_made_anew(value: Any) -> None:
    model = torch.nn.Sequential(Extra(2, 2))
    model[0].scale = value
    [found] = extra_states(model, extra("0._extra_state", copy.copy(value))).others
    assert (found.name, found.template.data) == ("0._extra_state", None)
    model[0].scale = "another"
    assert found.value_of() == "another"


@pytest.mark.parametrize("owner", ["class", "instance"])
def test_a_replaced_function_makes_extra_states(monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    model, preparation, _ = with_extra_states(None)
    made = Extra.get_extra_state

    def replaced(*args: Any) -> Any:  # keeps the one before alive
        return made(model[0]) or b"scales"

    monkeypatch.setattr(Extra if owner == "class" else model[0], "get_extra_state", replaced)
    thin = prepared.ThinSave(preparation, leaves_out=True).models()[0].sharded_state_dict()
    assert thin["0._extra_state"].data == b"scales"


@pytest.mark.parametrize(
    "state",
    [
        extra("0.something", 1),
        extra("1._extra_state", None),
        extra("0._extra_state", torch.arange(3.0)),
        {"0.weight": torch.zeros(1)},
        {"nested": {"list": [1]}},
    ],
)
def test_values_that_cannot_be_made_anew_are_refused(state: dict[str, Any]) -> None:
    model = torch.nn.Sequential(Extra(2, 2))
    with pytest.raises(UnprovableError):
        extra_states(model, state)


def with_extra_states(*scales: Any) -> tuple[Any, prepared.Preparation, list[Any]]:
    """Returns a model, what a full save prepares of its extra states, and their sharded objects."""
    model = torch.nn.Sequential(*(Extra(2, 2) for _ in scales))
    state: dict[str, Any] = {}
    for number, scale in enumerate(scales):
        model[number].scale = scale
        state |= extra(f"{number}._extra_state", scale)
    preparation = prepared.Preparation({"model": [model], "optimizer": no_optimizer(), "args": None})
    objects = list(state.values())
    preparation.note_models({"model": [model], "optimizer": no_optimizer()}, {"model": state})
    return model, preparation, objects


def empty_keys(objects: list[Any]) -> tuple[str, ...]:
    """Returns the keys of objects without a value, as a save finds them."""
    return tuple(item.unique_key for item in objects if item.data is None)


def test_extra_states_without_a_value_are_left_out_of_thin_state_dicts_and_saved() -> None:
    values = [None, io.BytesIO(b"scales"), None, None]
    model, preparation, objects = with_extra_states(*values)
    preparation.extra_states[0].all[3].keys = frozenset()  # another rank stores it
    full = empty_keys(objects[:3])
    preparation.note_empty(full)
    for _ in range(2):
        save = prepared.ThinSave(preparation, leaves_out=True)
        assert list(save.models()[0].sharded_state_dict()) == [MARK, "1._extra_state"]
        assert save.empty_objects(()) == full
    model[0].scale, model[1].scale = io.BytesIO(b"new"), None
    save = prepared.ThinSave(preparation, leaves_out=True)
    thin = save.models()[0].sharded_state_dict()
    assert list(thin) == [MARK, "0._extra_state", "1._extra_state"]
    assert thin["0._extra_state"].data.getvalue() == b"new"
    whole = prepared.ThinSave(preparation, leaves_out=False).models()[0].sharded_state_dict()
    assert list(whole)[1:] == [f"{number}._extra_state" for number in range(4)]
    seen = empty_keys([thin["1._extra_state"]])
    keys = save.empty_objects(seen)
    assert keys == (objects[2].unique_key, objects[1].unique_key)


def test_a_thin_state_dict_that_lacks_a_chunk_is_not_saved() -> None:
    model, preparation, _ = with_extra_states(io.BytesIO(b"scales"))
    thin = prepared.ThinSave(preparation, leaves_out=False)
    (chunk,) = thin.models()
    with pytest.raises(UnprovableError, match="did not ask for the state of all 1 model chunks"):
        thin.require_used()
    assert "0._extra_state" in chunk.sharded_state_dict() and len(model) == 1
    thin.require_used()


def test_each_save_must_ask_for_all_and_lists_the_objects_without_a_value_anew() -> None:
    model, preparation, objects = with_extra_states(None, None)
    call = {"model": [model], "optimizer": no_optimizer(), "args": None}
    full = empty_keys(objects)
    preparation.note_empty(full)
    preparation.is_complete, preparation._conditions = True, prepared._conditions(call)
    save = preparation.begin(call, leaves_out=True)
    save.models()[0].sharded_state_dict()
    save.require_used()
    assert save.empty_objects(()) == full
    save = preparation.begin(call, leaves_out=True)
    with pytest.raises(UnprovableError, match="did not ask for the state"):
        save.require_used()
    model[0].scale = io.BytesIO(b"scales")
    thin = save.models()[0].sharded_state_dict()
    assert "0._extra_state" in thin
    assert save.empty_objects(()) == full[1:], "an object would be stored twice"


def test_a_layer_with_two_names_has_an_extra_state_under_each() -> None:
    """Megatron's T5 has its output layer as `output_layer`, and in `lm_head`."""
    layer = Extra(2, 2)
    model = torch.nn.ModuleDict({"head": torch.nn.ModuleDict({"output": layer}), "output": layer})
    layer.scale = io.BytesIO(b"scales")
    found = extra_states(
        model, extra("head.output._extra_state", layer.scale) | extra("output._extra_state", layer.scale)
    )
    assert [one.value_of() for one in found.all] == [layer.scale] * 2


def test_an_extra_state_that_megatron_has_not_stored_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with --ckpt-drop-redundant-extra-state of Megatron's main, before FP8 has scales."""
    model = torch.nn.Sequential(Extra(2, 2), Extra(2, 2))
    state = {f"{number}._extra_state": LocalNonpersistentObject(None) for number in range(2)}
    preparation = prepared.Preparation({"model": [model], "optimizer": no_optimizer(), "args": None})
    preparation.note_models({"model": [model], "optimizer": no_optimizer()}, {"model": state})
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    for decides in (False, True):
        if decides:
            name = "_fp8_extra_state_is_persistent"
            monkeypatch.setattr(checkpointing, name, lambda value: value == b"scale_fwd", raising=False)
        model[1].scale = b"recipe" if decides else None
        (chunk,) = prepared.ThinSave(preparation, leaves_out=False).models()
        assert list(chunk.sharded_state_dict()) == [MARK]
        model[1].scale = b"scale_fwd"
        with pytest.raises(UnprovableError, match="has a value to be stored"):
            chunk.sharded_state_dict()


class Nothing(Extra):
    """Has an extra state for the sake of checkpoints of other layers, as Megatron's have."""

    def get_extra_state(self) -> None:
        """Returns nothing."""
        return None


class Counted(Extra):
    """Returns None, but does something else, too."""

    def get_extra_state(self) -> None:
        self.asked += 1
        return None

    asked = 0


def with_layers(*layers: Any) -> tuple[Any, prepared.Preparation, tuple[str, ...]]:
    """Returns a model, what a full save prepares of it, and the keys of its extra states."""
    model = torch.nn.Sequential(*layers)
    state: dict[str, Any] = {}
    for number in range(len(layers)):
        state |= extra(f"{number}._extra_state", None)
    preparation = prepared.Preparation({"model": [model], "optimizer": no_optimizer(), "args": None})
    keys = empty_keys(list(state.values()))
    preparation.note_models({"model": [model], "optimizer": no_optimizer()}, {"model": state})
    preparation.note_empty(keys)
    return model, preparation, keys


def test_modules_that_can_only_return_none_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, preparation, keys = with_layers(Nothing(2, 2), Counted(2, 2))
    assert [one.name for one in preparation.extra_states[0].others] == ["1._extra_state"]
    before = model[1].asked
    save = prepared.ThinSave(preparation, leaves_out=True)
    assert list(save.models()[0].sharded_state_dict()) == [MARK]
    assert save.empty_objects(()) == keys and model[1].asked == before + 1
    whole = prepared.ThinSave(preparation, leaves_out=False).models()[0].sharded_state_dict()
    assert list(whole)[1:] == ["0._extra_state", "1._extra_state"]


def test_a_function_of_a_modules_own_is_noticed() -> None:
    model, preparation, _ = with_layers(Nothing(2, 2))
    preparation.survey.tensors_if_unchanged(no_optimizer())
    model[0].get_extra_state = lambda: b"scales"
    with pytest.raises(UnprovableError):
        preparation.survey.tensors_if_unchanged(no_optimizer())


@pytest.mark.parametrize("change", ["class", "base class", "code"])
def test_modules_are_asked_once_their_class_is_another(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    class Derived(Nothing):
        pass

    def scales(self: Any) -> Any:
        return b"scales"

    model, preparation, _ = with_layers(Derived(2, 2))
    if change == "code":  # as IPython's autoreload does
        monkeypatch.setattr(Nothing.get_extra_state, "__code__", scales.__code__)
    else:
        monkeypatch.setattr(
            Derived if change == "class" else Nothing, "get_extra_state", scales, raising=False
        )
    thin = prepared.ThinSave(preparation, leaves_out=True).models()[0].sharded_state_dict()
    assert thin["0._extra_state"].data == model[0].get_extra_state() == b"scales"


def test_a_class_that_answers_for_its_methods_is_asked() -> None:
    class Answering(Nothing):
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    _, preparation, _ = with_layers(Answering(2, 2))
    assert [one.name for one in preparation.extra_states[0].others] == ["0._extra_state"]


def test_an_object_without_a_value_keeps_its_place() -> None:
    _, preparation, keys = with_layers(Nothing(2, 2))
    full = ("before", *keys, "after")
    preparation.note_empty(full)
    save = prepared.ThinSave(preparation, leaves_out=True)
    save.models()[0].sharded_state_dict()
    assert save.empty_objects(("before", "after")) == full
    assert save.empty_objects(("after", "new")) == (*keys, "after", "new")


def test_a_module_with_a_function_of_its_own_is_asked() -> None:
    layer = Nothing(2, 2)
    layer.get_extra_state = lambda: None
    _, preparation, _ = with_layers(layer)
    assert [one.name for one in preparation.extra_states[0].others] == ["0._extra_state"]


class Grouped(Extra):
    """Stores its extra state as Megatron's TEGroupedLinear does: split, if it says so."""

    parts = 3
    calls = 0

    def _split_extra_state(self, state: Any) -> list[Any]:
        self.calls += 1
        return [state if self.scale is None else f"{state}{number}" for number in range(self.parts)]


def test_extra_states_of_grouped_layers_are_split_anew_once_a_save() -> None:
    model = torch.nn.Sequential(Grouped(2, 2), torch.nn.ModuleDict({"in": Grouped(2, 2)}))
    keys = [f"{name}._extra_state{part or ''}" for name in ("0", "1.in") for part in range(3)]
    state = {key: item for name in keys for key, item in extra(name, None).items()}
    found = extra_states(model, state).all
    assert [one.name for one in found] == keys
    calls = model[0].calls
    assert [one.value_of() for one in found] == [None] * 6
    assert model[0].calls == calls + 1
    model[0].scale = "s"
    assert [one.value_of() for one in found] == ["s0", "s1", "s2", None, None, None]
    assert [one.value_of() for one in found[:2]] == ["s0", "s1"], "this save ends here"
    model[0].scale = "t"
    assert [one.value_of() for one in found[:3]] == ["t0", "t1", "t2"]
    Grouped.parts = 2
    try:
        assert found[1].value_of() == "t1"
        with pytest.raises(UnprovableError, match="fewer parts"):
            found[2].value_of()
    finally:
        Grouped.parts = 3


def test_parts_of_extra_states_of_other_layers_are_refused() -> None:
    with pytest.raises(
        UnprovableError, match=r"'0\._extra_state1' of the model is not a module's extra state"
    ):
        extra_states(torch.nn.Sequential(Extra(2, 2)), extra("0._extra_state1", None))
    with pytest.raises(UnprovableError, match="fewer parts"):
        extra_states(torch.nn.Sequential(Grouped(2, 2)), extra("0._extra_state3", None))


def test_tensors_and_factories_of_a_model_need_no_function() -> None:
    tensor = ShardedTensor.from_rank_offsets("0.weight", torch.zeros(2, 2))
    assert extra_states(torch.nn.Sequential(Extra(2, 2)), {"0.weight": tensor, "more": [tensor]}).all == []


def test_views_follow_their_tensor_to_other_memory() -> None:
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3))
    part = torch.chunk(weight, 2)[1]
    row = rows.row_of("w", part, {id(weight): 7})
    assert row.number == 7 and row.offset == 24
    weight.data = torch.arange(100.0, 112.0).reshape(4, 3)
    assert row.view is not None
    assert rows.view_of(weight, row.view).tolist() == weight[2:].tolist()


def test_views_of_a_weight_within_a_larger_buffer_follow_it() -> None:
    """Megatron's distributed optimizer lays all weights of a model into one buffer."""
    buffer = torch.arange(100.0)
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    weight.data = buffer[5:17].view(4, 3)
    part = torch.chunk(weight, 2)[1]
    row = rows.row_of("w", part, {id(weight): 7})
    assert row.view is not None and row.offset == 24
    assert rows.view_of(weight, row.view).tolist() == part.tolist() == weight[2:].tolist()
    weight.data = buffer[50:62].view(4, 3)
    found = rows.view_of(weight, row.view)
    assert found.tolist() == weight[2:].tolist() and found.data_ptr() == weight.data_ptr() + row.offset


def prepare(model: Any) -> tuple[prepared.Preparation, dict[str, Any], Tensors]:
    """Returns what a full save of one weight prepares, the arguments of that save, and what it has stored."""
    call = {"model": [model], "optimizer": no_optimizer(), "args": None}
    preparation, found = prepared.Preparation(call), Tensors()
    found.add("w", model[0].weight, Mutability.NOW)
    preparation.complete({}, found, found.tensors[:])
    return preparation, call, found


def test_what_a_transformation_changes_is_not_kept() -> None:
    preparation, call, found = prepare(make())
    for _ in range(2):
        found.keys[0], found.stable[0] = "other", True
        save = preparation.begin(call, leaves_out=False)
        save.require_unchanged(call)
        found = save.tensors(lambda: nothing_promised, is_lazy=False)
        assert (found.keys, found.stable) == (["w"], [False])


def test_addresses_are_those_of_the_moment_at_which_tensors_are_handed_over() -> None:
    model = make()
    preparation, call, _ = prepare(model)
    save = preparation.begin(call, leaves_out=False)
    save.require_unchanged(call)
    model[0].weight.data = torch.ones(6, 4)
    described = save.tensors(lambda: nothing_promised, is_lazy=False).described
    assert described is None or described.addresses.tolist() == [model[0].weight.data_ptr()]
    model[0].weight.data = torch.ones(6, 5)
    with pytest.raises(SaveFailedError, match="while Megatron made a state dict"):
        save.tensors(lambda: nothing_promised, is_lazy=False)


class World:
    """Stands in for torch.distributed's."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


ARGUMENTS: dict[str, Any] = {
    "model": [make()],
    "optimizer": no_optimizer(),
    "args": types.SimpleNamespace(no_save_optim=True),
    "model_sd_kwargs": {"metadata": {"singleton_local_shards": True}},
    "optim_sd_kwargs": {"metadata": {"distrib_optim_sharding_type": "fully_reshardable"}},
}


def test_tensors_are_classified_anew_once_what_that_depends_on_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, times, stepped = make(), [0], set[int]()
    preparation, call, _ = prepare(model)
    monkeypatch.setattr(fences, "stepped_optimizers", lambda: frozenset(stepped))

    def classifier() -> Any:
        times[0] += 1
        return nothing_promised

    def saved(*, is_lazy: bool) -> int:
        save = preparation.begin(call, leaves_out=False)
        save.require_unchanged(call)
        save.tensors(classifier, is_lazy=is_lazy)
        return times[0]

    assert [saved(is_lazy=False), saved(is_lazy=False), saved(is_lazy=True)] == [1, 1, 2]
    weight = model[0].weight.data  # kept, so that its memory is not used again
    model[0].weight.data = weight.clone()
    assert [saved(is_lazy=True), saved(is_lazy=True)] == [3, 3]
    stepped.add(1)  # an optimizer of somebody else's may own any of them
    assert [saved(is_lazy=True), saved(is_lazy=True)] == [4, 5]


@pytest.mark.parametrize("name", [*ARGUMENTS, "the world"])
def test_a_save_with_other_arguments_is_not_prepared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preparation, call, _ = prepare(make())
    preparation.begin(call, leaves_out=False)
    if name == "the world":
        monkeypatch.setattr(torch.distributed, "group", types.SimpleNamespace(WORLD=World()))
    with pytest.raises(UnprovableError, match="the arguments of the save have changed"):
        preparation.begin(call | {name: ARGUMENTS.get(name)}, leaves_out=False)


def test_a_save_whose_state_dict_somebody_else_makes_by_now_is_not_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preparation, call, _ = prepare(make())
    preparation.begin(call, leaves_out=False)
    monkeypatch.setattr(checkpointing, "generate_state_dict", make)
    with pytest.raises(UnprovableError, match="has wrapped or replaced Megatron's generate_state_dict"):
        preparation.begin(call, leaves_out=False)


def test_after_a_prepared_save_that_came_to_nothing_the_next_one_is_full() -> None:
    preparation, call, _ = prepare(make())
    save = preparation.begin(call, leaves_out=False)
    save.require_unchanged(call)
    save.release()
    with pytest.raises(UnprovableError, match="did not complete its preparation"):
        preparation.begin(call, leaves_out=False)


def test_so_it_is_after_one_that_came_to_nothing_later() -> None:
    preparation, call, _ = prepare(make())
    save = preparation.begin(call, leaves_out=False)
    save.require_unchanged(call)
    save.tensors(lambda: nothing_promised, is_lazy=False)
    save.release()
    preparation.begin(call, leaves_out=False).release()
    with pytest.raises(UnprovableError, match="did not complete its preparation"):
        preparation.begin(call, leaves_out=False)


ARGUMENTS_THAT_DECIDE = [
    *("ckpt_format", "no_save_optim", "use_distributed_optimizer"),
    *("ckpt_fully_parallel_save", "ckpt_fully_parallel_save_process_group"),
]


@pytest.mark.parametrize("name", ARGUMENTS_THAT_DECIDE)
def test_each_argument_that_decides_what_ranks_store_is_compared(name: str) -> None:
    call = {"model": [make()], "optimizer": no_optimizer()}
    arguments = types.SimpleNamespace(**dict.fromkeys(ARGUMENTS_THAT_DECIDE, "one"))
    noted = prepared._conditions(call | {"args": arguments})
    assert prepared._conditions(call | {"args": copy.copy(arguments)}) == noted
    setattr(arguments, name, "another")
    assert prepared._conditions(call | {"args": arguments}) != noted


@pytest.mark.parametrize("changed", ["rank", "size"])
def test_another_world_at_the_same_address_is_noticed(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(torch.distributed, "group", types.SimpleNamespace(WORLD=world))
    preparation, call, _ = prepare(make())
    preparation.begin(call, leaves_out=False)
    monkeypatch.setattr(world, changed, lambda: 2, raising=False)
    with pytest.raises(UnprovableError, match="the arguments of the save have changed"):
        preparation.begin(call, leaves_out=False)


def test_arguments_are_compared_by_their_values() -> None:
    one: list[Any] = [1, {"a": (2, None)}]
    noted = prepared._plain({"x": one})
    assert prepared._plain({"x": copy.deepcopy(one)}) == noted
    one[1]["a"] = (3, None)
    assert prepared._plain({"x": one}) != noted and prepared._plain({"x": tuple(one)}) != noted


def test_a_tensor_made_for_one_save_cannot_be_prepared() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UnprovableError, match="'w' is made anew"):
        rows.row_of("w", weight.detach().clone(), {id(weight): 0})


@pytest.mark.parametrize(
    ("weight", "view"),
    [
        (torch.zeros(4), lambda weight: weight.view(torch.int16)),
        (torch.zeros(4, dtype=torch.complex64), torch.view_as_real),  # of which torch notes the base
    ],
)
def test_a_view_of_another_dtype_cannot_be_prepared(weight: torch.Tensor, view: Callable[[Any], Any]) -> None:
    with pytest.raises(UnprovableError, match="'w' is made anew"):
        rows.row_of("w", view(weight), {id(weight): 0})


def test_a_quantized_tensor_cannot_be_prepared() -> None:
    """What is stored of it is a copy, made for one save; a prepared save would store its own bytes."""
    model, found = make(), Tensors()
    preparation = prepared.Preparation({"model": [model], "optimizer": no_optimizer(), "args": None})
    found.add("w", model[0].weight.detach().clone(), Mutability.NEVER)
    with pytest.raises(UnprovableError, match="'w' is quantized"):
        preparation.complete({}, found, [model[0].weight])
    assert not preparation.is_complete


@pytest.mark.parametrize(
    "left_out",
    [
        ShardedTensor.from_rank_offsets,
        lambda key, data: ShardedTensorFactory(key, data, lambda *_: [], lambda loaded: loaded),
    ],
    ids=["tensor", "factory"],
)
def test_a_state_dict_without_tensors_that_megatron_has_made_cannot_be_prepared(
    left_out: Callable[..., Any],
) -> None:
    """The program may leave them out of one save alone."""
    model, found = make(), Tensors()
    preparation = prepared.Preparation({"model": [model], "optimizer": no_optimizer(), "args": None})
    state: dict[str, Any] = {
        "weight": ShardedTensor.from_rank_offsets("weight", model[0].weight),
        "bias": left_out("bias", model[0].bias),
    }
    preparation.note_models({"model": [model], "optimizer": no_optimizer()}, {"model": state})
    found.add("weight", model[0].weight, Mutability.NOW)
    preparation.complete({"model": state}, found, found.tensors[:])
    del state["bias"]
    with pytest.raises(UnprovableError, match="left out tensors"):
        preparation.complete({"model": state}, found, found.tensors[:])


def test_a_state_dict_that_is_saved_once_more_is_what_later_saves_are_prepared_by() -> None:
    model, padding = make(), [torch.zeros(2), torch.zeros(3)]
    call = {"model": [model], "optimizer": no_optimizer(), "args": None}
    preparation, classified = prepared.Preparation(call), list[Any]()

    def classifier() -> Any:
        classified.append(0)
        return nothing_promised

    def saved() -> Tensors:
        save = preparation.begin(call, leaves_out=False)
        save.require_unchanged(call)
        return save.tensors(classifier, is_lazy=False)

    def complete(*tensors: Any) -> None:
        found = Tensors()
        for number, tensor in enumerate(tensors):
            found.add(str(number), tensor, Mutability.AT_FENCE)
        preparation.complete({}, found, found.tensors[:])

    preparation._padding = padding[:1]
    complete(model[0].weight, padding[0])
    first = saved()
    assert [one.data_ptr() for one in first.tensors] == [model[0].weight.data_ptr(), padding[0].data_ptr()]
    preparation._padding = padding
    complete(padding[1], model[2].weight, model[0].weight)
    tensors, count = [padding[1], model[2].weight, model[0].weight], len(classified)
    found = saved()
    assert [id(one) for one in found.tensors] == list(map(id, tensors))
    assert found.described is None or found.described.addresses.tolist() == [t.data_ptr() for t in tensors]
    assert found.mutability == [Mutability.NOW] * 3 and len(classified) == count + 1
    complete(*tensors)
    assert saved().mutability == [Mutability.NOW] * 3, "the classification is that of the save itself"


def test_a_negated_view_cannot_be_prepared() -> None:
    """An address alone does not say that its values are to be negated."""
    model = make()
    model[0].weight.data = torch._neg_view(torch.ones(6, 4))
    with pytest.raises(UnprovableError, match="a negated or conjugated view"):
        prepare(model)


def test_a_thin_state_dict_cannot_be_saved_by_anybody_else() -> None:
    preparation: Any = types.SimpleNamespace()
    thin = Mark.of(0, 0, thin=preparation)
    with pytest.raises(SaveFailedError, match="another strategy"):
        torch.save({"model": thin.data}, io.BytesIO())
    with pytest.raises(SaveFailedError, match="another strategy"):
        torch.save({"model": thin}, io.BytesIO())
    full = Mark.of(0, 0, preparation=preparation)
    for mark in (thin, full):
        buffer = io.BytesIO()
        torch.save(mark.without_data(), buffer)  # as ranks exchange metadata
        buffer.seek(0)
        assert torch.load(buffer, weights_only=False).key == f"{MARK}.0.0"


def test_a_thin_state_dict_that_has_lost_its_mark_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks the tensors, and looks like any other state dict."""
    saving = preparing._Saving(is_on=True, is_constant=False)
    saving.thin = types.SimpleNamespace(is_taken=False)  # type: ignore[assignment]
    monkeypatch.setattr(preparing, "_saving", saving)
    provider = ShardedStateProvider({"model": {}}, lambda: nothing_promised)
    with pytest.raises(CheckpointingException, match="has lost its mark"):
        provider.tensors()
    saving.thin.is_taken = True  # type: ignore[union-attr]
    assert len(provider.tensors()) == 0


def test_a_tensor_that_comes_into_a_thin_state_dict_is_not_left_out() -> None:
    preparation, call, _ = prepare(make())
    save = preparation.begin(call, leaves_out=False)
    save.require_unchanged(call)
    chunk: dict[str, Any] = {MARK: Mark.of(0, 0, thin=save)}
    provider = ShardedStateProvider({"model": chunk}, lambda: nothing_promised)
    assert len(provider.tensors()) > 0
    chunk["new"] = ShardedTensor.from_rank_offsets("new", torch.ones(3))
    with pytest.raises(CheckpointingException, match="tensors that the last save did not have"):
        provider.tensors()


def of_transformer_engine() -> Any:
    """Returns a function written there: TE pickles tensors, in other bytes each time."""
    space: dict[str, Any] = {"__name__": "transformer_engine.pytorch.module.base", "io": io, "made": []}
    source = "def get_extra_state(self):\n    made.append(0)\n    return io.BytesIO(b'%d' % len(made))\n"
    exec(source, space)
    return space["get_extra_state"]


def test_extra_states_of_transformer_engine_may_have_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(Extra(2, 2))
    monkeypatch.setattr(Extra, "get_extra_state", of_transformer_engine())
    [found] = extra_states(model, extra("0._extra_state", model[0].get_extra_state())).all
    assert found.value_of().getvalue() == b"3"
    with pytest.raises(UnprovableError, match="is not what its module makes"):
        extra_states(model, extra("0._extra_state", None))


def test_extra_states_of_others_must_be_what_their_modules_make(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = torch.nn.Sequential(Extra(2, 2)), iter(range(9))
    monkeypatch.setattr(Extra, "get_extra_state", lambda self: io.BytesIO(b"%d" % next(made)))
    with pytest.raises(UnprovableError, match="is not what its module makes"):
        extra_states(model, extra("0._extra_state", model[0].get_extra_state()))


def test_marks_are_whole_on_each_rank() -> None:
    """Megatron checks that all shards of an object are there, and other ranks may not be prepared."""
    preparation: Any = types.SimpleNamespace()
    marks = [Mark.of(0, rank, preparation=preparation) for rank in range(2)]
    assert marks[0].unique_key != marks[1].unique_key
    assert [mark.global_shape for mark in marks] == [(1,), (1,)]
