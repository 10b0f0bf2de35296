"""One rank of a tiny pretraining that counts the Python objects in its memory after two of its steps."""

import gc
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pretrain_tiny
from megatron.training import get_args
from megatron.training import training as loop

MOST_WAIT_SECONDS = 30.0


def count() -> Counter[str]:
    """Returns how many objects of each type there are that the garbage collector tracks.

    Other threads stand still meanwhile: CPython cannot resize a tuple to which the list of objects refers.
    """
    gc.collect()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        return Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())
    finally:
        sys.setswitchinterval(usual)


def main(arguments: list[str], folder: str) -> None:
    """Pretrains with `arguments`; writes FOLDER/grownN.json, by how many there are more of each type.

    The environment variable COUNTED has the two steps, and by how many objects of a type memory may grow.
    """
    sys.argv = ["pretrain_tiny.py", *arguments]
    first, last, most = map(int, os.environ["COUNTED"].split())
    begun: Counter[str] = Counter()
    take_step = loop.train_step

    def train_step(*args: Any, **options: Any) -> Any:
        results = take_step(*args, **options)
        step = get_args().curr_iteration
        if step in (first, last):
            loop.maybe_finalize_async_save(blocking=True)
        if step == first:
            begun.update(count())
        if step == last:
            deadline, grown = time.monotonic() + MOST_WAIT_SECONDS, count() - begun
            # Drains and deletions may be under way, and end.
            while grown and max(grown.values()) >= most and time.monotonic() < deadline:
                time.sleep(0.5)
                grown = count() - begun
            Path(folder, f"grown{os.environ['RANK']}.json").write_text(json.dumps(grown))
        return results

    loop.train_step = train_step
    pretrain_tiny.main()
