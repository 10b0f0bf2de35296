"""The state that every contender saves: a GPT and its optimizer, as data-parallel ranks hold them.

Each rank has all parameters in bfloat16, as views of one buffer, and its share of the optimizer's fp32 master
copies and moments, cut where parameters end. Every element is a function of its place and of how many steps
were made, so that what was loaded can be checked without a second copy.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch

KINDS = ("param", "exp_avg", "exp_avg_sq")
BYTES_PER_PARAMETER = 2 + 4 * len(KINDS)
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
_FACTOR = 2654435761 - (1 << 32)
_PERIOD = 1_000_003  # elements; prime, so that blocks of a file that were exchanged differ
_POISON = 0xA5


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of the model."""

    layers: int
    hidden: int
    vocabulary: int = 8192

    @staticmethod
    def of_bytes(size: int, layers: int) -> Model:
        """Returns the largest model whose checkpoint has at most `size` bytes; its width is at least 32."""
        widths = itertools.takewhile(lambda h: Model(layers, h).bytes <= size, itertools.count(32, 16))
        return Model(layers, max(widths, default=32))

    @property
    def parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the order of the optimizer's buffer."""
        hidden = self.hidden
        layer = {
            "input_layernorm": (hidden,),
            "self_attention.linear_qkv": (3 * hidden, hidden),
            "self_attention.linear_proj": (hidden, hidden),
            "pre_mlp_layernorm": (hidden,),
            "mlp.linear_fc1": (4 * hidden, hidden),
            "mlp.linear_fc2": (hidden, 4 * hidden),
        }
        named: list[tuple[str, tuple[int, ...]]] = [
            ("embedding.word_embeddings.weight", (self.vocabulary, hidden))
        ]
        for number, (name, shape) in itertools.product(range(self.layers), layer.items()):
            prefix = f"decoder.layers.{number}.{name}"
            named += [(f"{prefix}.weight", shape), (f"{prefix}.bias", shape[:1])]
        last = "decoder.final_layernorm"
        return [*named, (f"{last}.weight", (hidden,)), (f"{last}.bias", (hidden,))]

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters)

    @property
    def bytes(self) -> int:
        """The size of a checkpoint, in which nothing is stored twice."""
        return BYTES_PER_PARAMETER * self.elements


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the optimizer's state: of one kind, of one parameter, the elements that this rank has."""

    kind: str
    start: int  # in the optimizer's buffer, all ranks' parts together
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        return f"{self.kind}.{self.start}"


class Everything(torch.optim.Optimizer):
    """An optimizer whose step changes every bit pattern of the state: adds one to all elements, as integers.

    It is one of torch's optimizers, so that fences before steps are met as in training.
    """

    def __init__(self, pieces: list[Piece], change: Callable[[], None]) -> None:
        mains = {piece.start: piece.tensor for piece in pieces if piece.kind == KINDS[0]}
        super().__init__(list(mains.values()), {})
        self._change = change
        for piece in pieces:
            if piece.kind != KINDS[0]:
                self.state[mains[piece.start]][piece.kind] = piece.tensor

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self._change()


class State:
    """One rank's state; `steps` counts what it has been through."""

    def __init__(self, model: Model, rank: int, ranks: int) -> None:
        self.model, self.rank, self.ranks, self.steps = model, rank, ranks, 0
        buffer = torch.empty(model.elements, dtype=torch.bfloat16)
        self.parameters = dict(_views(model, buffer))
        self.pieces = list(_pieces(model, rank, ranks))
        self._whole = [buffer.view(torch.int16), *(p.tensor.view(torch.int32) for p in self.pieces)]
        self._salts = [1, *(2 + KINDS.index(p.kind) + p.start for p in self.pieces)]
        whole = torch.arange(_PERIOD, dtype=torch.int32).mul_(_FACTOR)
        self._bases = {base.dtype: base for base in (whole, whole.to(torch.int16))}
        for memory, salt in zip(self._whole, self._salts, strict=True):
            for block, base in self._blocks(memory):
                torch.add(base, salt, out=block)
        self.optimizer = Everything(self.pieces, self._change)

    @property
    def bytes(self) -> int:
        """The size of the memory that this rank holds."""
        return sum(memory.nbytes for memory in self._whole)

    def step(self) -> None:
        """Changes every element."""
        self.optimizer.step()

    def poison(self) -> None:
        """Overwrites every element, before a load."""
        for memory in self._whole:
            memory.view(torch.uint8).fill_(_POISON)

    def difference(self, steps: int) -> str | None:
        """Returns the name of a tensor that is not as it was after so many steps; None if all are."""
        names = ["the parameters", *(piece.key for piece in self.pieces)]
        for name, memory, salt in zip(names, self._whole, self._salts, strict=True):
            blocks = self._blocks(memory)
            if not all(torch.equal(block, base + (salt + steps)) for block, base in blocks):
                return name
        return None

    def _change(self) -> None:
        for memory in self._whole:
            memory.add_(1)
        self.steps += 1

    def _blocks(self, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the blocks of a tensor, each with what it contains but for the salt and the steps."""
        for block in memory.split(_PERIOD):
            yield block, self._bases[memory.dtype][: len(block)]


def _views(model: Model, buffer: torch.Tensor) -> Iterator[tuple[str, torch.nn.Parameter]]:
    at = 0
    for name, shape in model.parameters:
        parameter = torch.nn.Parameter(torch.empty(0, dtype=buffer.dtype))
        parameter.data = buffer[at : at + math.prod(shape)].view(shape)
        at += math.prod(shape)
        yield name, parameter


def _pieces(model: Model, rank: int, ranks: int) -> Iterator[Piece]:
    share = -(-model.elements // (64 * ranks)) * 64
    low, high = rank * share, min((rank + 1) * share, model.elements)
    ends = list(itertools.accumulate(math.prod(shape) for _, shape in model.parameters))
    cuts = [low, *(end for end in ends if low < end < high), high]
    for (begin, end), kind in itertools.product(itertools.pairwise(cuts), KINDS):
        yield Piece(kind, begin, torch.empty(end - begin))
