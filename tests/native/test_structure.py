"""native.Structure notices every difference in nested containers, and keeps nothing alive."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from megatron_datastates.engine.native import Structure


class Thing:
    """An object with attributes, and with weak references."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Pair(NamedTuple):
    first: Any
    second: Any


class Incomparable:
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")

    __hash__ = object.__hash__


def noted(owners: list[Any], roots: list[Any], **names: list[str]) -> Structure:
    lists: dict[str, list[str]] = {"attributes": [], "own": [], "opaque": []}
    return Structure(owners, roots, **(lists | names))


def nested() -> list[Any]:
    things = [Thing() for _ in range(6)]
    return [
        {"a": things[0], things[1]: (things[2], 5, "text"), (1, "key"): {}},
        OrderedDict(x=things[3], y=None),
        defaultdict(list, z=[[], {1, 2}, frozenset({3})]),
        Pair(things[4], 2.5),
        [things[5], [b"bytes"]],
    ]


def swap_keys(one: Any) -> None:
    values = list(one[0].items())
    one[0].clear()
    one[0].update(reversed(values))


CHANGES: list[Callable[[Any], object]] = [
    lambda one: one[0].update(a=Thing()),
    lambda one: one[0].update(b=Thing()),
    lambda one: one[0].pop("a"),
    lambda one: one[0].update(a=one[1]["x"]),
    lambda one: one[0].update(b=one[0].pop("a")),
    swap_keys,
    lambda one: one[0].__setitem__((1, "key"), []),  # another container
    lambda one: one[0].__setitem__((1, "key"), None),
    lambda one: one[1].update(y=0),
    lambda one: one[1].update(y=False),
    lambda one: one[1].update(y={}),
    lambda one: one[2]["z"][0].append(None),
    lambda one: one[2]["z"][1].add(3),
    lambda one: one[2]["z"].__setitem__(1, {1, 3}),
    lambda one: one[2]["z"].append({4}),
    lambda one: one.__setitem__(3, Pair(one[3].first, 2)),
    lambda one: one.__setitem__(3, Pair(one[4][0], 2.5)),
    lambda one: one[4][1].__setitem__(0, b"other"),
    lambda one: one[4][1].__setitem__(0, Incomparable()),
    lambda one: one.reverse(),
    lambda one: one.append(one[4][0]),
    lambda one: one.pop(),
    lambda one: one.__setitem__(slice(None), []),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change: Callable[[Any], object]) -> None:
    roots = nested()
    kept = [dict(roots[0]), dict(roots[1]), list(roots)]  # so that no address is used again
    structure = noted([], roots)
    assert structure.leaves([], roots) is not None
    change(roots)
    assert structure.leaves([], roots) is None
    assert kept


def test_equal_values_and_other_containers_are_no_change() -> None:
    roots = nested()
    structure = noted([], roots)
    roots[1]["x"], number = roots[1]["x"], 2.0
    roots[3] = (roots[3].first, number + 0.5)
    roots[4] = [roots[4][0], [b"by" + b"tes"]]
    roots[2] = dict(roots[2])
    assert structure.leaves([], roots) is not None


def test_leaves_come_in_the_order_of_the_containers() -> None:
    things = [Thing() for _ in range(5)]
    owner = Thing(held={"one": things[0], things[1]: things[2]})
    roots = [things[3], [1, "two", (things[4],)]]
    structure = noted([owner], roots, attributes=["held"])
    assert structure.leaves([owner], roots) == [Thing, *things]


OWNER_CHANGES: list[Callable[[Any], object]] = [
    lambda owner: setattr(owner, "held", {"a": Thing()}),
    lambda owner: setattr(owner, "held", None),
    lambda owner: delattr(owner, "held"),
    lambda owner: setattr(owner, "absent", {}),
    lambda owner: setattr(owner, "method", None),
    lambda owner: setattr(owner, "__class__", type("Other", (Thing,), {})),
]


@pytest.mark.parametrize("change", OWNER_CHANGES)
def test_every_change_of_an_owner_is_noticed(change: Callable[[Any], object]) -> None:
    owner = Thing(held={"a": Thing()}, other=1)
    structure = noted([owner], [], attributes=["held", "absent"], own=["method"])
    owner.other = 2  # nobody asked for it
    assert structure.leaves([owner], []) is not None
    change(owner)
    assert structure.leaves([owner], []) is None


def test_another_number_of_owners_is_noticed() -> None:
    owners = [Thing(held={}), Thing(held={})]
    structure = noted(owners, [], attributes=["held"])
    assert structure.leaves(owners[:1], []) is None
    assert structure.leaves([*owners, owners[0]], []) is None


def test_an_object_without_attributes_is_no_owner() -> None:
    with pytest.raises(AttributeError):
        noted([5], [])


def test_of_opaque_values_only_their_kind_matters() -> None:
    roots: list[Any] = [{"step": 1, "other": 2}]
    structure = noted([], roots, opaque=["step"])
    roots[0]["step"] = 7
    assert structure.leaves([], roots) is not None
    roots[0]["step"] = Thing()
    assert structure.leaves([], roots) is None


def test_nothing_is_kept_alive_and_a_new_object_at_an_old_address_is_another_one() -> None:
    holder: dict[str, Any] = {"a": Thing()}
    structure = noted([], [holder])
    address = id(holder["a"])
    holder.clear()
    things = [Thing() for _ in range(100)]  # the address is used again at once
    holder["a"] = next(thing for thing in things if id(thing) == address)
    assert structure.leaves([], [holder]) is None


def test_containers_that_change_while_they_are_compared_are_changed() -> None:
    class Evil:
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            roots[0].clear()
            return True

        __hash__ = object.__hash__

    roots: list[Any] = [{"a": Evil(), "b": 1}]
    structure = noted([], roots)
    roots[0]["a"] = Evil()
    assert structure.leaves([], roots) is None


def test_containers_that_hold_themselves_raise_and_do_not_crash() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RecursionError):
        noted([], loop)


def test_an_interrupt_is_passed_on() -> None:
    class Interrupting:
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            raise KeyboardInterrupt

        __hash__ = object.__hash__

    structure = noted([], [Interrupting()])
    with pytest.raises(KeyboardInterrupt):
        structure.leaves([], [Interrupting()])
