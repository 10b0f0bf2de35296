"""A training program whose checkpoints also hold a data loader's position, and state of the program's own.

    python recipes/own_state.py --save CKPT
    python recipes/own_state.py --save CKPT --steps 12

The second command resumes where the first stopped, in the middle of an epoch, with the very next batch.
Weights, position and history are published together: no kill leaves one without the others. The program
needs torchdata (`pip install torchdata`) and no Megatron. docs/providers.md explains state providers.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import megatron_datastates as ds
from megatron_datastates.providers import DataLoaderState, Entry, ObjectSource, StateReader, StreamSource

SAMPLES, FEATURES = 14, 4


class Lines(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Samples that their number determines."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, torch.arange(FEATURES) + float(number)


class History:
    """A state provider of the program's own: what it has trained on, and its best loss so far."""

    def __init__(self) -> None:
        self.best = float("inf")
        self.lines: list[str] = []

    def add(self, step: int, samples: list[int], loss: float) -> None:
        self.best = min(self.best, loss)
        self.lines.append(f"step {step}: samples {samples}, loss {loss:.6f}, best {self.best:.6f}\n")

    def entries(self) -> Iterator[Entry]:
        """Yields what a save stores: an object, and a stream, whose size nobody needs to know."""
        yield ObjectSource("best", self.best)
        yield StreamSource.from_buffers("lines", [line.encode() for line in self.lines])

    def restore(self, reader: StateReader) -> None:
        """Takes back what a load has found."""
        self.best = reader.read_object("best")
        self.lines = b"".join(map(bytes, reader.open_stream("lines"))).decode().splitlines(keepends=True)


def main(arguments: list[str] | None = None) -> None:
    """Trains, saves after every step, and prints the history of all steps, those before a resume included.

    Args:
        arguments: by default those of the command line.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(arguments)

    torch.manual_seed(1)
    model, history = torch.nn.Linear(FEATURES, 1), History()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = StatefulDataLoader(
        Lines(), batch_size=2, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(2)
    )
    # The whole state of the program. Values that are providers store and restore themselves.
    state = {"model": model.state_dict(), "data": DataLoaderState(loader), "history": history, "step": 0}

    done = sorted(args.save.glob("step_*/datastates.manifest"))
    if done:
        state["step"] = ds.load(done[-1].parent, into=state)["step"]
    batches = (batch for _ in iter(int, 1) for batch in loader)  # of all epochs
    while state["step"] < args.steps:
        state["step"] += 1
        numbers, features = next(batches)
        loss = (model(features).squeeze() - numbers).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.add(state["step"], numbers.tolist(), loss.item())
        ds.save(state, args.save / f"step_{state['step']:04d}", iteration=state["step"])
    print("".join(history.lines), end="")


if __name__ == "__main__":
    main()
