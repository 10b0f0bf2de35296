"""native.Structure notices every difference in nested containers, and keeps nothing alive."""

import gc
import subprocess
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
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


def test_only_chosen_leaves_are_returned() -> None:
    one = nested()
    structure = noted([], one)
    leaves = structure.leaves([], one)
    assert leaves is not None and len(leaves) == 6
    structure.choose([1, 4])
    for _ in range(2):
        chosen = structure.leaves([], one)
        assert chosen is not None and [id(leaf) for leaf in chosen] == [id(leaves[1]), id(leaves[4])]
        one[0]["a"] = one[0]["a"]  # the second look is a walk
    one[4][0] = Thing()  # not chosen, and compared all the same
    assert structure.leaves([], one) is None


def test_a_leaf_that_is_not_there_cannot_be_chosen() -> None:
    structure = noted([], nested())
    with pytest.raises(IndexError, match="no leaf"):
        structure.choose([0, 6])
    assert structure.leaves([], nested()) is None


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
    kept = [Thing()]
    while id(kept[-1]) != address:  # it is used again, mostly at once
        assert len(kept) < 1_000_000
        kept.append(Thing())
    holder["a"] = kept[-1]
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


needs_watches = pytest.mark.skipif(
    sys.version_info < (3, 12) or sys.version_info[:3] == (3, 13, 0),  # python/cpython#125608
    reason="Python does not report all changes",
)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """A dictionary of another test that is collected meanwhile would count as a change."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@needs_watches
@pytest.mark.usefixtures("no_collections")
def test_what_python_reports_no_change_of_is_not_walked_again() -> None:
    roots, owner = nested(), Thing(held={"a": Thing(), "b": [Thing(), {"c": Thing()}]}, other=1)
    structure = noted([owner], roots, attributes=["held"])
    owner.other = 2  # nobody asked for it
    roots[4] = list(roots[4])  # what is in lists is looked at each time
    walked = structure.leaves([owner], roots)
    for _ in range(3):
        assert structure.leaves([owner], roots) == walked
    assert structure.walks == 0
    roots[0]["more"] = 1
    del roots[0]["more"]
    assert structure.leaves([owner], roots) == walked
    assert structure.walks == 1
    assert structure.leaves([owner], roots) == walked
    assert structure.walks == 1, "nothing has changed since the last walk"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ["attribute", "dictionary"])
def test_every_change_below_a_dictionary_is_noticed_after_a_walk_of_equal_ones(
    change: Callable[[Any], object], place: str
) -> None:
    held = nested()
    owner = Thing(held={"one": held})
    kept = [owner.held, dict(held[0]), dict(held[1]), list(held)]
    structure = noted([owner], [owner.held], attributes=["held"])
    if place == "attribute":
        owner.held = {"one": held}  # the dictionaries that are to be watched are others now
    else:
        held[0] = owner.held["one"][0] = dict(held[0])
    for _ in range(2):
        assert structure.leaves([owner], [owner.held]) is not None
    change(held)
    assert structure.leaves([owner], [owner.held]) is None
    assert kept


CHANGES_OF_ONE: list[Callable[[dict[str, Any]], object]] = [
    lambda one: one.__setitem__("new", None),
    lambda one: one.__setitem__("a", None),
    lambda one: one.__delitem__("a"),
    lambda one: one.pop("a"),
    lambda one: one.popitem(),
    lambda one: one.clear(),
    lambda one: one.update(a=None),
    lambda one: one.update({"new": 1}),
    lambda one: one.setdefault("new", 1),
    lambda one: one.__ior__({"new": 1}),
    lambda one: one.__init__(new=1),  # type: ignore[misc]
]


@pytest.mark.parametrize("change", CHANGES_OF_ONE)
@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda one: defaultdict(list, one)])
def test_every_way_to_change_a_dictionary_is_noticed(
    change: Callable[[dict[str, Any]], object], kind: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    one = kind({"a": Thing(), "b": Thing()})
    structure = noted([], [one])
    assert structure.leaves([], [one]) is not None
    change(one)
    assert structure.leaves([], [one]) is None


def test_a_value_that_a_defaultdict_makes_is_noticed() -> None:
    made: defaultdict[str, list[int]] = defaultdict(list)
    structure = noted([], [made])
    assert structure.leaves([], [made]) is not None
    made["new"]
    assert structure.leaves([], [made]) is None


def test_another_dictionary_of_attributes_is_noticed() -> None:
    owner = Thing(held={"a": Thing()})
    kept = vars(owner)
    structure = noted([owner], [], attributes=["held"])
    assert structure.leaves([owner], []) is not None
    owner.__dict__ = {"held": {"a": kept["held"]["a"]}}
    assert structure.leaves([owner], []) is not None, "they hold the same"
    kept["held"] = {}  # of interest no more
    assert structure.leaves([owner], []) is not None
    owner.held["a"] = Thing()
    assert structure.leaves([owner], []) is None


def test_names_of_attributes_need_not_be_interned() -> None:
    owner = Thing(held={"a": Thing()})
    structure = noted([owner], [], attributes=["held"])
    assert structure.leaves([owner], []) is not None
    vars(owner)["".join(["he", "ld"])] = {}
    assert structure.leaves([owner], []) is None


def test_lists_that_are_freed_while_they_are_compared_are_changed() -> None:
    class Evil:
        __slots__ = ("is_evil",)

        def __eq__(self, other: object) -> bool:
            if self.is_evil:
                held.clear()
            return True

        __hash__ = object.__hash__

    good, evil = Evil(), Evil()
    good.is_evil, evil.is_evil = False, True
    held: dict[str, Any] = {"a": [good, 1], "b": [[2], {3}, "text"]}
    structure = noted([], [held])
    assert structure.leaves([], [held]) is not None
    held["a"][0] = evil
    assert structure.leaves([], [held]) is None


_WITHOUT_WATCHERS = """
import ctypes
from megatron_datastates.engine.native import Structure
add = ctypes.pythonapi.PyDict_AddWatcher
add.argtypes = [ctypes.c_void_p]
callback = ctypes.cast(ctypes.pythonapi.PyObject_Length, ctypes.c_void_p)  # never called
taken = 0
try:
    while add(callback) >= 0:
        taken += 1
except RuntimeError:
    pass
assert taken > 0
one = {"a": [1]}
structure = Structure([], [one], attributes=[], own=[], opaque=[])
assert structure.leaves([], [one]) == [] and structure.walks == 1
one["a"] = [2]
assert structure.leaves([], [one]) is None and structure.walks == 2
"""


@needs_watches
def test_where_others_watch_all_that_python_lets_them_all_is_walked() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_WATCHERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Freeing:
    """Without weak references; its comparison runs code."""

    __slots__ = ("act",)

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __eq__(self, other: object) -> bool:
        self.act()
        return True

    __hash__ = object.__hash__


@pytest.mark.parametrize("make", [lambda one: one, lambda one: {one}], ids=["item", "set"])
def test_a_comparison_that_frees_what_was_seen_already(make: Callable[[Any], Any]) -> None:
    inner = [Thing(text="x" * 10)]
    roots: list[Any] = [inner, [make(Freeing(lambda: None))]]
    structure = noted([], roots)
    assert structure.leaves([], roots) is not None
    roots[1][0] = make(Freeing(inner.clear))
    found = structure.leaves([], roots)
    assert found is None or found[0].text == "x" * 10
