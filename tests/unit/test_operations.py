"""docs/operations.md quotes messages as the code words them, and has an entry for every line of the log."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"
PYTHON = sorted((ROOT / "megatron_datastates").rglob("*.py"))
NATIVE = sorted(path for path in (ROOT / "cuda").rglob("*") if path.suffix in (".cc", ".h"))
LEVELS = {"info", "warning", "error", "exception", "critical"}
LEAST_LETTERS = 5  # a fragment with fewer says too little
LOGGED_WITHOUT_ENTRY = {
    "%s": "the line of a report or a fault of an older checkpoint, which have entries of their own",
    "rank %d: %s": "says which rank has the trouble with staging memory, which has entries of its own",
}

# -- the document -------------------------------------------------------------------------------------------


def quoted() -> Iterator[str]:
    """Yields the fragments between backticks in the first column of the page's tables."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


def pattern(fragment: str) -> re.Pattern[str]:
    """Returns what finds a fragment in a message; … stands for anything. A single word is a whole message."""
    if " " not in fragment:
        return re.compile(rf"\A{re.escape(fragment)}\Z")
    return re.compile(".*".join(re.escape(part.strip()) for part in fragment.split("…")), re.DOTALL)


# -- the source ---------------------------------------------------------------------------------------------


def text_of(node: ast.expr) -> str:
    """Returns the text of an expression, with … for what is only known at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


@functools.cache
def messages_in_python() -> list[str]:
    """Returns all texts but docstrings, and sums of texts as one."""
    found = []
    for path in PYTHON:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found += [
            plain(text_of(node))
            for node in nodes
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in docstrings
        ]
    return found


def plain(text: str) -> str:
    """Returns a text with … for the placeholders of `logging`."""
    return re.sub(r"%(\.\d+)?[sdrgf]", "…", text)


@functools.cache
def messages_in_native_code() -> list[str]:
    """Returns the string literals of each statement, with … for what stands between them."""
    token = re.compile(r'//[^\n]*|"((?:[^"\\]|\\.)*)"|(;)|([^\s";/]+|/)')
    found = []
    for path in NATIVE:
        statement: list[str] = []
        for literal, end, other in (match.groups() for match in token.finditer(path.read_text())):
            if end:
                found.append("".join(statement))
                statement = []
            elif literal is not None:
                statement.append(literal)
            elif other:
                statement.append(" " if other == "," else "…")
        found.append("".join(statement))
    return found


def logged() -> Iterator[tuple[str, str]]:
    """Yields the place and the format of each call of a logger."""
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                on = ast.unparse(node.func.value)
                if node.func.attr in LEVELS and ("logger" in on or "getLogger" in on):
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield place, text_of(node.args[0])


# -- tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fragment", sorted(set(quoted())))
def test_a_quoted_message_is_in_the_source(fragment: str) -> None:
    assert len(re.findall(r"\w", fragment)) >= LEAST_LETTERS, "too short to recognize a message by"
    wanted = pattern(fragment)
    found = any(wanted.search(text) for text in (*messages_in_python(), *messages_in_native_code()))
    assert found, f"docs/operations.md quotes a message that the code does not have: {fragment}"


def test_each_line_of_the_log_has_an_entry() -> None:
    patterns = [pattern(fragment) for fragment in set(quoted())]
    lines = list(logged())
    assert len(lines) > 20, "the calls of loggers were not found"
    missing = [
        f"{place}: {text}"
        for place, text in lines
        if text not in LOGGED_WITHOUT_ENTRY and not any(one.search(plain(text)) for one in patterns)
    ]
    assert not missing, "not in docs/operations.md: " + "\n".join(missing)


def test_exceptions_are_still_logged() -> None:
    assert LOGGED_WITHOUT_ENTRY.keys() <= {text for _, text in logged()}
