"""The model's order of steps is that of the code: the search would prove nothing of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates.engine.faults import Faults
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.publishing import directory_publisher
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from tests.model import publishing
from tests.unit.states import State, new_saver

POINTS = {
    "write index": "write index",
    "rename index": "rename index",
    "sync directory of index": "sync index",
    "write manifest": "write temporary",  # and before it, the model's "create temporary"
    "rename manifest": "rename manifest",
    "sync directory of manifest": "sync manifest",
    "write metadata": "write metadata",
}
CALLS = {
    "require_files": ["look"],
    "files_in_manifest": ["read old manifest", "list"],
    "require_published": ["look again"],
    "remove_replaced": ["remove"],
}


def modelled() -> Iterator[str]:
    step = "write index"
    yield step
    while step := publishing._NEXT.get(step, ""):
        if step != "create temporary":
            yield step


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that the steps of rank 0's publishing thread are added to."""
    steps: list[str] = []
    point = Faults.point

    def recorded(self: Faults, name: str) -> None:
        steps.extend([POINTS[name]] if name in POINTS else [])
        point(self, name)

    monkeypatch.setattr(Faults, "point", recorded)

    def noting(original: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
        left = list(names)

        def call(*args: Any) -> Any:
            steps.append(left.pop(0))
            return original(*args)

        return call

    for function, names in CALLS.items():
        original = getattr(directory_publisher, function)
        monkeypatch.setattr(directory_publisher, function, noting(original, names))
    return steps


def test_a_checkpoint_is_published_and_replaced_in_the_order_of_the_model(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def save(content: bytes) -> None:
        extras = PublicationExtras(metadata=content)  # as of Megatron's saves
        published = saver.start(tmp_path, State({"weight": torch.ones(8)}), extras=extras).wait()
        assert published is Outcome.PUBLISHED

    saver = new_saver()
    save(b"{}")
    taken = request.getfixturevalue("taken")
    save(b"{ }")
    saver.close()
    assert taken == list(modelled())
