"""Modules that stand in for packages that these tests do not need, and files of frameworks beside them."""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Anything(type):
    """A class that has every attribute, and does nothing when called. Classes derived from it are real."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        is_derived = isinstance(cls.__bases__[0], Anything)
        return super().__call__(*args, **kwargs) if is_derived else None


class Empty(types.ModuleType):
    """A module that has every attribute, and every submodule."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an Empty module for every name below `roots`, with the attributes given for it."""

    def __init__(self, roots: tuple[str, ...], given: Mapping[str, Mapping[str, Any]]) -> None:
        self.roots, self.given = roots, given

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        vars(module).update(self.given.get(module.__name__, {}))


def installed_file(distribution: str, path: str) -> Path | None:
    """Returns a file of an installed distribution; None if it is not installed. Imports nothing."""
    try:
        return Path(str(importlib.metadata.distribution(distribution).locate_file(path)))
    except importlib.metadata.PackageNotFoundError:
        return None


def run_released(
    distribution: str, path: str, roots: tuple[str, ...], given: Mapping[str, Mapping[str, Any]]
) -> Any:
    """Runs a file of a framework's wheel as the module that it is, and returns it.

    Everything else below the packages `roots`, the framework's own included, is Empty but for what is
    `given`, while the file runs.
    """
    file = installed_file(distribution, path)
    assert file is not None, distribution
    name = path.removesuffix(".py").replace("/", ".")
    before = set(sys.modules)
    finder = _Finder(roots, given)
    sys.meta_path.insert(0, finder)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.meta_path.remove(finder)
        for added in set(sys.modules) - before:
            if isinstance(sys.modules[added], Empty):
                del sys.modules[added]
    return module
