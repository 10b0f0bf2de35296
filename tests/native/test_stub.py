"""The native module's typed stub is written by hand; here it is held against the module.

A first draft of it: python -m nanobind.stubgen -m megatron_datastates.engine._native
"""

import ast
from pathlib import Path
from typing import Any

from nanobind.stubgen import StubGen

from megatron_datastates.engine import _native

STUB = Path(_native.__file__).with_name("_native.pyi")


def test_stub_declares_what_the_module_has():
    generated = StubGen(_native)
    generated.put(_native)
    assert shape(STUB.read_text()) == shape(generated.get())


def shape(source: str) -> dict[str, Any]:
    """Names what a stub declares: functions with their parameters, classes, constants.

    Types are left out: a stub may promise more precise ones than nanobind can know.
    """
    return shape_of_body(ast.parse(source).body)


def shape_of_body(body: list[ast.stmt]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in body:
        match node:
            case ast.ClassDef(name=name, body=inner):
                found[name] = shape_of_body(inner)
            case ast.FunctionDef(name=name, args=arguments):
                positional = [a.arg for a in arguments.posonlyargs + arguments.args]
                keyword = [a.arg for a in arguments.kwonlyargs]
                found.setdefault(name, []).append((positional, keyword))
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found[name] = "constant"
    return found
