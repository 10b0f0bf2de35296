"""What prepared saves rely on with Megatron's optimizers, most of which store their state by parameter.

Megatron's own classes, without their constructors, which need CUDA. Real loops:
tests/e2e/test_prepared_optimizers.py.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)

from megatron_datastates.mcore.hooks.attach import replace
from megatron_datastates.mcore.save import prepared, thin_states
from megatron_datastates.mcore.save.attributes import UnprovableError
from megatron_datastates.mcore.save.preparing import wrap_sharded_param_state_dp_reshardable
from megatron_datastates.mcore.save.survey import Survey, gathers, optimizers_in
from megatron_datastates.mcore.save.thin_groups import groups_alone
from megatron_datastates.mcore.save.thin_states import states_left_out

pytestmark = pytest.mark.conformance  # also with a checkout of Megatron, whose optimizers change

Torch = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
ADAM: Torch = torch.optim.Adam
SGD: Torch = lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)  # noqa: E731
WITHOUT_STATE: Torch = lambda groups: torch.optim.SGD(groups, lr=0.1)  # noqa: E731


class Grouped(torch.optim.SGD):
    """Keeps the step in its groups, as Transformer Engine's Adam does."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, lr=0.1, momentum=0.9)

    def step(self, *args: Any) -> Any:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
        return super().step(*args)


def step(optimizer: Any) -> None:
    """Lets an optimizer take a step, and its loss scaler change."""
    for link in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in link.optimizer.param_groups:
            group["lr"] *= 0.5
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        link.optimizer.step()
        if getattr(link, "grad_scaler", None) is not None:
            link.grad_scaler.scale *= 2


def fp32(model: torch.nn.Module, make: Torch = ADAM, *, empty: bool = False) -> Any:
    optimizer = FP32Optimizer.__new__(FP32Optimizer)
    weights = [] if empty else [one for one in model.parameters() if one.dim() == 2]
    others = [one for one in model.parameters() if one.dim() != 2]
    optimizer.optimizer = make([{"params": weights}, {"params": others}])
    optimizer.is_stub_optimizer = False
    return optimizer


def float16(model: torch.nn.Module, make: Torch = ADAM, *, empty: bool = False) -> Any:
    """Returns an optimizer with copies of the parameters, and an object for a loss scaler."""
    optimizer = Float16OptimizerWithFloat16Params.__new__(Float16OptimizerWithFloat16Params)
    inner = fp32(model, make, empty=empty).optimizer
    optimizer.float16_groups = [group["params"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["params"] = [one.detach().clone() for one in group["params"]]
    optimizer.fp32_from_float16_groups = [list(group["params"]) for group in inner.param_groups]
    optimizer.fp32_from_fp32_groups = [[] for _ in inner.param_groups]
    optimizer.optimizer, optimizer.is_stub_optimizer = inner, False
    scaler = SimpleNamespace(scale=64.0)
    scaler.state_dict = lambda: {"scale": scaler.scale}
    optimizer.grad_scaler = scaler
    return optimizer


def chain_of(*optimizers: Any, cls: type = ChainedOptimizer) -> Any:
    found = cls.__new__(cls)
    found.chained_optimizers, found.is_stub_optimizer = list(optimizers), False
    found.model_chunks, found.pg_collection = [], None
    return found


def layer_wise(*optimizers: Any) -> Any:
    return chain_of(*optimizers, cls=LayerWiseDistributedOptimizer)


class Bucket(SimpleNamespace):
    """A bucket or a buffer: an object that can be referred to weakly."""


def distributed(model: torch.nn.Module) -> Any:
    """Returns a distributed optimizer of one bucket and one group, as far as a survey looks at it."""
    params = list(model.parameters())
    bucket = Bucket(grad_data=torch.zeros(8), numel_unpadded=7)
    ranges = {param: {"gbuf_local": Range(0, param.numel())} for param in params}
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer, optimizer.is_stub_optimizer = torch.optim.Adam(params), False
    optimizer.buffers, optimizer.gbuf_ranges = [Bucket(buckets=[bucket])], [{"fp32": [{"param_map": ranges}]}]
    optimizer.model_param_group_index_map = {param: (0, at) for at, param in enumerate(params)}
    optimizer.per_bucket_numel = [{(torch.float32, torch.float32): [8]}]
    optimizer.per_bucket_numel_unpadded = [{(torch.float32, torch.float32): [7]}]
    optimizer.data_parallel_group_idx, optimizer.data_parallel_group = 0, object()
    return optimizer


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))


def shards(model: torch.nn.Module) -> dict[str, Any]:
    return {
        name: ShardedTensor.from_rank_offsets(name, one, replica_id=(0, 0, 0))
        for name, one in model.named_parameters()
    }


def stored(state: Any) -> tuple[Any, Any]:
    """Returns the tensors of a state dict, and all else that is stored of it, as Megatron separates them."""
    apply_factories(state)
    _, persistent = extract_nonpersistent(state)
    return extract_sharded_base(persistent)


def thin_state(optimizer: Any, asked: Callable[[Any], None] = lambda one: None) -> Any:
    optimizers = optimizers_in(optimizer)
    with groups_alone(optimizers), states_left_out(optimizers, asked):
        return optimizer.sharded_state_dict({"model": {}})


def test_stand_ins_are_in_the_groups_that_parameters_are_in() -> None:
    """Megatron's main pairs groups and parameters strictly, and looks for main parameters in them by id."""
    optimizer = float16(make_model())
    optimizer.fp32_from_float16_groups[1] = []  # the group has parameters that are fp32 in the model, too
    thin = thin_states._thin(optimizer)
    models, mains = thin.float16_groups, thin.fp32_from_float16_groups
    held = [group["params"] for group in thin.optimizer.param_groups]
    assert [list(map(len, groups)) for groups in (models, mains, held)] == [[1, 0], [1, 0], [1, 1]]
    assert held[0][0] is mains[0][0] and held[1][0] is models[0][0] is not mains[0][0]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everyone: list[Any], one: Any) -> None:
        everyone[:] = [copy.deepcopy(one)]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)


KINDS = [
    pytest.param(fp32, id="fp32"),
    pytest.param(float16, id="float16"),
    pytest.param(lambda *args, **more: chain_of(fp32(*args, **more)), id="chain of one"),
    pytest.param(
        lambda model, make, **more: chain_of(float16(model[0], make, **more), float16(model[1], make)),
        id="chain",
    ),
    pytest.param(lambda *args, **more: layer_wise(float16(*args, **more)), id="layer-wise"),
    pytest.param(
        lambda model, make, **more: layer_wise(float16(model[0], make, **more), float16(model[1], make)),
        id="layer-wise of two",
    ),
]


@pytest.mark.conformance
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [ADAM, SGD, WITHOUT_STATE, Grouped], ids=["adam", "sgd", "plain", "grouped"])
@pytest.mark.parametrize("empty", [False, True], ids=["full", "empty group"])
def test_a_thin_state_dict_has_all_that_is_no_tensor(
    kind: Callable[..., Any], make: Torch, empty: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    optimizer = kind(model, make, empty=empty)
    for _ in range(2):
        step(optimizer)
        tensors, expected = stored(optimizer.sharded_state_dict({"model": shards(model)}))
        assert list(nested_values(tensors)) or make is WITHOUT_STATE
        caplog.clear()
        before = [vars(one).copy() for one in (optimizer, *getattr(optimizer, "chained_optimizers", ()))]
        found, others = stored(thin_state(optimizer))
        assert (list(nested_values(found)), others) == ([], expected)
        assert not caplog.records
        assert before == [vars(one) for one in (optimizer, *getattr(optimizer, "chained_optimizers", ()))]


def test_megatron_is_asked_for_each_optimizer() -> None:
    model, asked = make_model(), list[Any]()
    links = [fp32(model[0]), float16(model[1])]
    thin_state(chain_of(*links), asked.append)
    assert asked == links


def first_state(optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(optimizer.optimizer.state.values()))
    return found


def first_ranges(optimizer: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = optimizer.gbuf_ranges[0]["fp32"][0]["param_map"]
    return found


def split_group(optimizer: Any) -> None:
    groups = optimizer.optimizer.param_groups
    groups.append(groups[0] | {"params": [groups[0]["params"].pop()]})


def replace_parameter(optimizer: Any) -> None:
    params, state = optimizer.optimizer.param_groups[0]["params"], optimizer.optimizer.state
    new = torch.nn.Parameter(params[0].detach().clone())
    state[new], params[0] = state.pop(params[0]), new


CHANGES: list[Callable[[Any], object]] = [
    lambda one: setattr(one, "optimizer", copy.copy(one.optimizer)),
    lambda one: setattr(one, "sharded_state_dict", lambda *_: {}),
    lambda one: setattr(one, "state_dict", lambda: {}),
    lambda one: one.optimizer.param_groups[0]["params"].reverse(),
    split_group,
    replace_parameter,
    lambda one: first_state(one).update(exp_avg=first_state(one)["exp_avg"].clone()),
    lambda one: first_state(one)["exp_avg"].resize_(1),
    lambda one: first_state(one).update(count=1),
    lambda one: first_state(one).pop("exp_avg_sq"),
    lambda one: one.optimizer.state.clear(),
    lambda one: first_state(one).update(exp_avg=first_state(one).pop("exp_avg")),  # another order
]
CHANGES_OF_MAIN_PARAMETERS: list[Callable[[Any], object]] = [
    lambda one: one.fp32_from_float16_groups[0].__setitem__(0, torch.zeros(6, 4)),
    lambda one: one.fp32_from_float16_groups[0].reverse(),
    lambda one: one.float16_groups[0].reverse(),
    lambda one: one.float16_groups.reverse(),
    lambda one: one.fp32_from_fp32_groups[0].append(one.float16_groups[0].pop()),
    lambda one: one.fp32_from_float16_groups[0][0].resize_(1),
]
CHANGES_OF_BUCKETS: list[Callable[[Any], object]] = [
    lambda one: setattr(one, "get_parameter_state_dp_reshardable", lambda: {}),
    lambda one: one.buffers.append(Bucket(buckets=[])),
    lambda one: one.buffers.__setitem__(0, copy.copy(one.buffers[0])),
    lambda one: one.buffers[0].buckets.__setitem__(0, copy.copy(one.buffers[0].buckets[0])),
    lambda one: setattr(one.buffers[0].buckets[0], "grad_data", torch.zeros(16)),
    lambda one: setattr(one.buffers[0].buckets[0], "numel_unpadded", 8),
    lambda one: first_ranges(one).popitem(),
    lambda one: next(iter(first_ranges(one).values())).update(gbuf_local=Range(1, 2)),
    lambda one: one.model_param_group_index_map.update({next(iter(first_ranges(one))): (0, 5)}),
    lambda one: setattr(one, "data_parallel_group_idx", 1),
    lambda one: setattr(one, "data_parallel_group", object()),
    lambda one: setattr(one, "distributed_optimizer_instance_id", 1),
    lambda one: setattr(one, "per_bucket_numel", [{(torch.float32, torch.float32): [9]}]),
    lambda one: next(iter(one.per_bucket_numel_unpadded[0].values())).append(1),
]


@pytest.mark.parametrize(
    ("kind", "change"),
    [(fp32, change) for change in CHANGES]
    + [(float16, change) for change in [*CHANGES, *CHANGES_OF_MAIN_PARAMETERS]]
    + [(distributed, change) for change in [*CHANGES, *CHANGES_OF_BUCKETS]],
)
def test_a_survey_notices_every_change_of_an_optimizer(
    kind: Callable[..., Any], change: Callable[[Any], object]
) -> None:
    model = make_model()
    optimizer = kind(model)
    step(optimizer)
    kept = copy.copy(optimizer.__dict__), first_state(optimizer).copy()  # so that nothing dies by the change
    survey = Survey([model], optimizer)
    step(optimizer)
    survey.tensors_if_unchanged(optimizer)
    change(optimizer)
    with pytest.raises(UnprovableError):
        survey.tensors_if_unchanged(optimizer)
    assert kept


def test_main_parameters_in_other_memory_are_found_there() -> None:
    model = make_model()
    optimizer = float16(model)
    step(optimizer)
    survey = Survey([model], optimizer)
    main = optimizer.fp32_from_float16_groups[0][0]
    main.data = main.data + 1
    tensors, described = survey.tensors_if_unchanged(optimizer)
    assert any(one is main for one in tensors)
    assert described is None or described.addresses.tolist() == [one.data_ptr() for one in tensors]


def test_an_optimizer_replaced_in_a_chain_of_chains_is_noticed() -> None:
    model = make_model()
    optimizer = float16(model)
    chain = chain_of(layer_wise(optimizer))
    survey = Survey([model], chain)
    survey.tensors_if_unchanged(chain)
    chain.chained_optimizers[0].chained_optimizers[0] = copy.copy(optimizer)
    with pytest.raises(UnprovableError, match="an optimizer was added, removed or replaced"):
        survey.tensors_if_unchanged(chain)


def test_links_that_join_another_chain_are_noticed() -> None:
    """The number of a link in its chain may be a part of names."""
    model = make_model()
    links = [float16(one) for one in model]
    survey = Survey([model], chain_of(layer_wise(links[0]), links[1]))
    survey.tensors_if_unchanged(chain_of(layer_wise(links[0]), links[1]))
    for other in (chain_of(*links), layer_wise(*links), chain_of(layer_wise(*links))):
        with pytest.raises(UnprovableError, match="an optimizer was added, removed or replaced"):
            survey.tensors_if_unchanged(other)


def test_a_link_that_has_no_parameters_any_more_is_noticed() -> None:
    model = make_model()
    links = [float16(one) for one in model]
    survey = Survey([model], chain_of(*links))
    links[1].is_stub_optimizer = True
    with pytest.raises(UnprovableError, match="an optimizer was added, removed or replaced"):
        survey.tensors_if_unchanged(chain_of(*links))


class OwnStateDict(torch.optim.Adam):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


def with_hook(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    inner = torch.optim.Adam(groups)
    inner.register_state_dict_post_hook(lambda *_: None)
    return inner


def with_its_own(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    inner = torch.optim.Adam(groups)
    inner.state_dict = lambda: {}  # type: ignore[method-assign,assignment]
    return inner


@pytest.mark.parametrize("make", [OwnStateDict, with_hook, with_its_own])
def test_torch_optimizers_that_make_state_dicts_of_their_own_are_refused(make: Torch) -> None:
    optimizer = float16(make_model(), make)
    with pytest.raises(UnprovableError, match="may make state dicts of its own"):
        thin_state(optimizer)
    assert "sharded_state_dict" not in vars(optimizer)


class Derived(FP32Optimizer):
    pass


@pytest.mark.parametrize(
    "optimizer", [Derived.__new__(Derived), layer_wise(torch.optim.Adam(make_model().parameters())), None]
)
def test_other_optimizers_than_megatrons_are_refused(optimizer: Any) -> None:
    with pytest.raises(UnprovableError, match="which is not one of Megatron's"):
        Survey([make_model()], optimizer)


@pytest.mark.parametrize("kind", [FP32Optimizer, Float16OptimizerWithFloat16Params, ChainedOptimizer])
def test_a_method_that_somebody_replaces_is_not_trusted(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    optimizer = layer_wise(fp32(model), float16(model))
    Survey([model], optimizer)
    monkeypatch.setattr(kind, "sharded_state_dict", lambda *_: {})
    with pytest.raises(UnprovableError, match=f"may change the state dict of {kind.__name__}"):
        Survey([model], optimizer)


def test_steps_that_differ_cannot_be_stored_once() -> None:
    optimizer = fp32(make_model())
    step(optimizer)
    first_state(optimizer)["step"] += 1
    with pytest.raises(UnprovableError, match="step is not the same"):
        thin_state(optimizer)


@pytest.mark.parametrize("state", [{}, {"step": 1}, {"ste": torch.zeros(6, 4)}])
def test_parameters_without_a_state_leave_something_that_is_not_a_tensor(state: dict[str, Any]) -> None:
    optimizer = fp32(make_model())
    step(optimizer)
    optimizer.optimizer.state[next(iter(optimizer.optimizer.state))] = state
    with pytest.raises(UnprovableError, match="a parameter has no state"):
        thin_state(optimizer)


def test_nothing_is_left_behind_when_making_a_state_dict_fails() -> None:
    model = make_model()
    links = [fp32(model[0]), float16(model[1])]

    def interrupt(optimizer: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        thin_state(chain_of(*links), interrupt)
    assert not any({"state_dict", "sharded_state_dict"} & vars(one).keys() for one in links)


def test_our_own_hook_of_an_optimizer_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sharded_param_state_dp_reshardable"
    monkeypatch.setattr(
        DistributedOptimizer, name, getattr(DistributedOptimizer, name)
    )  # comes back at the end
    replace(DistributedOptimizer, name, wrap_sharded_param_state_dp_reshardable)
    optimizer = distributed(make_model())
    assert optimizers_in(optimizer) == [optimizer]


@pytest.mark.parametrize(
    ("kind", "why"),
    [(fp32, "is not stored$"), (distributed, "not stored in buckets"), (layer_wise, "is not stored$")],
)
def test_a_save_without_the_optimizers_state_cannot_be_prepared(kind: Callable[..., Any], why: str) -> None:
    """Later ones, with the same arguments, may have it."""
    model = make_model()
    optimizer = kind(fp32(model)) if kind is layer_wise else kind(model)
    call = {"model": [model], "optimizer": optimizer, "args": None}
    preparation = prepared.Preparation(call)
    with pytest.raises(UnprovableError, match=why):
        preparation.note_models(call, {"model": shards(model)})


@pytest.mark.parametrize("kind", [fp32, distributed])
def test_a_thin_state_dict_that_lacks_an_optimizer_is_not_saved(kind: Callable[..., Any]) -> None:
    model = make_model()
    optimizer = kind(model)
    call = {"model": [model], "optimizer": optimizer, "args": None}
    preparation = prepared.Preparation(call)
    preparation.note_buckets(optimizer, {}, [])
    preparation.note_models(call, {"model": shards(model), "optimizer": {}})
    save = prepared.ThinSave(preparation, leaves_out=False)
    save.models()[0].sharded_state_dict()
    with pytest.raises(UnprovableError, match="1 model chunks and 1 optimizers"):
        save.require_used()
    save.note_asked(optimizer) if kind is fp32 else save.buckets(optimizer)
    save.require_used()


class DerivedLayerWise(LayerWiseDistributedOptimizer):
    pass


def test_layer_wise_optimizers_make_collective_calls() -> None:
    plain = fp32(make_model())
    assert gathers(layer_wise(plain)) and gathers(chain_of(plain, layer_wise(plain)))
    assert gathers(chain_of(plain, cls=DerivedLayerWise))
    distributed = DistributedOptimizer.__new__(DistributedOptimizer)
    assert not any(map(gathers, [plain, chain_of(plain, distributed), distributed, None]))


def test_stand_ins_are_never_stored() -> None:
    state = thin_state(float16(make_model()))
    held = [item for item in nested_values(state) if isinstance(item, LocalNonpersistentObject)]
    assert [item.unwrap() for item in held][:2] == [[0], [0]]
    assert not any(isinstance(item, ShardedTensor) for item in nested_values(state))
