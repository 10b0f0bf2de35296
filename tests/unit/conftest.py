"""What all unit tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from megatron_datastates.pipeline.saver import Saver
from tests.unit.states import new_saver

# No deadline: the first example of a test may be the one that loads half of torch.
settings.register_profile("unit", deadline=None, print_blob=True)
settings.load_profile("unit")


@pytest.fixture
def saver() -> Iterator[Saver]:
    saver = new_saver()
    yield saver
    saver.close()
