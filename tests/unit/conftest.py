"""What all unit tests share."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from megatron_datastates.pipeline.saver import Saver
from tests.unit.states import new_saver

# No deadline: the first example of a test may be the one that loads half of torch.
# HYPOTHESIS_EXAMPLES=5000 looks at that many examples, others each time; without it they are always the same.
EXAMPLES = os.environ.get("HYPOTHESIS_EXAMPLES")
settings.register_profile(
    "unit", deadline=None, print_blob=True, derandomize=EXAMPLES is None, max_examples=int(EXAMPLES or 100)
)
settings.load_profile("unit")


@pytest.fixture
def saver() -> Iterator[Saver]:
    saver = new_saver()
    yield saver
    saver.close()
