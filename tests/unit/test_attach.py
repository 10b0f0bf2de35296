"""What a hook replaces: a function once, wherever it was imported by name, and nothing of the same name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.hooks.attach import _missing, replace, replaced


def hook(original: Callable[[int], int], value: int) -> int:
    return 10 * original(value)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    """A module with a function, one that has imported it by name, and one with another of that name."""
    made = [ModuleType(f"made_for_a_test_{number}") for number in range(3)]
    for module in made:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    made[0].__dict__["f"] = made[1].__dict__["f"] = lambda value: value + 1
    made[2].__dict__["f"] = lambda value: value + 2
    return made


def test_a_function_has_one_hook_in_all_modules_that_have_it(modules: list[ModuleType]) -> None:
    for _ in range(2):
        replace(modules[0], "f", hook)
    assert [module.f(1) for module in modules] == [20, 20, 3]
    assert modules[0].f.__wrapped__(1) == 2


def test_a_hook_may_be_for_one_module_alone(modules: list[ModuleType]) -> None:
    replace(modules[0], "f", hook, everywhere=False)
    assert [module.f(1) for module in modules] == [20, 2, 3]


def test_a_method_that_is_inherited_has_the_hook_of_its_class() -> None:
    class Base:
        def f(self, value: int) -> int:
            return value + 1

    class Inherits(Base):
        pass

    class Own(Base):
        def f(self, value: int) -> int:
            return value + 2

    def method(original: Callable[..., int], self: Base, value: int) -> int:
        return 10 * original(self, value)

    for owner in (Base, Inherits, Own):
        replace(owner, "f", method)
    assert [owner().f(1) for owner in (Base, Inherits, Own)] == [20, 20, 30]


def test_what_is_replaced_for_a_while_comes_back_after_an_error(modules: list[ModuleType]) -> None:
    before: Any = modules[0].f
    with pytest.raises(KeyError), replaced(modules[0], "f", None):
        assert modules[0].f is None
        raise KeyError
    assert modules[0].f is before


def test_why_a_module_is_not_imported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_release.py").write_text("import needed_and_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    hooks = [versions.Hook(module, "f", "w") for module in ("of_a_release", "of_another_release")]
    assert _missing(hooks) == [
        "of_a_release.f (that module is not imported: No module named 'needed_and_not_installed')",
        "of_another_release.f",
    ]
