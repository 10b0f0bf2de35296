"""How many parameters a GPT of Megatron has, by how ranks hold them: Megatron's own formulas.

The source is `theoretical_memory_usage.py` of Megatron-LM, with what it leaves out: biases, positions, norms
of queries and keys, the copy of tied embeddings on the last pipeline stage.
"""

from __future__ import annotations

import ast
import dataclasses
import math

from megatron_datastates.errors import OptionError
from megatron_datastates.sizing.arguments import BY_PARAMETERS, Arguments

_MOST_LAYERS = 100_000


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Parameters of one pipeline stage, by how its ranks hold them."""

    tensor_parallel: int = 0  # split over tensor-parallel ranks
    replicated: int = 0  # whole on each tensor-parallel rank
    experts: int = 0  # split over expert-parallel ranks
    tied_copy: int = 0  # another stage stores these, and this one has an optimizer state of its own for them
    tensors: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            *(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )

    @property
    def stored(self) -> int:
        """Returns the parameters of the stage without copies."""
        return self.tensor_parallel + self.replicated + self.experts


def stages(arguments: Arguments, tensor_parallel: int, pipeline_parallel: int) -> list[Parameters]:
    """Returns the parameters of each pipeline stage. Raises OptionError."""
    layers = _layers(arguments)
    if len(layers) % pipeline_parallel:
        raise OptionError(
            f"--num-layers {len(layers)}: expected a multiple of the pipeline-parallel size "
            f"{pipeline_parallel}; {BY_PARAMETERS}"
        )
    each = _chunk(arguments, len(layers) // pipeline_parallel)
    chunks = [sum(layers[first : first + each], Parameters()) for first in range(0, len(layers), each)]
    # Of virtual stages, each rank has every `pipeline_parallel`-th.
    found = [sum(chunks[stage::pipeline_parallel], Parameters()) for stage in range(pipeline_parallel)]
    hidden = arguments.number("hidden-size")
    embedding = _padded_vocabulary(arguments, tensor_parallel) * hidden
    found[0] += Parameters(tensor_parallel=embedding, tensors=1)
    if _learns_positions(arguments):
        positions = arguments.number("max-position-embeddings") * hidden
        found[0] += Parameters(replicated=positions, tensors=1)
    norms = _norm_size(arguments)
    found[-1] += Parameters(replicated=norms * hidden, tensors=norms)
    if arguments.has("untie-embeddings-and-output-weights"):
        found[-1] += Parameters(tensor_parallel=embedding, tensors=1)
    elif pipeline_parallel > 1:
        found[-1] += Parameters(tied_copy=embedding, tensors=1)
    return found


def _chunk(arguments: Arguments, layers: int) -> int:
    """Returns how many of a rank's layers follow each other: those of a virtual pipeline stage."""
    flag, size = "num-layers-per-virtual-pipeline-stage", layers
    if not arguments.lacks(flag):
        size = arguments.number(flag)
    elif not arguments.lacks("num-virtual-stages-per-pipeline-rank"):
        flag = "num-virtual-stages-per-pipeline-rank"
        size = layers // arguments.number(flag) if layers % arguments.number(flag) == 0 else 0
    if not size or layers % size:
        raise OptionError(
            f"--{flag} {arguments.number(flag)}: expected a divisor of the {layers} layers of a stage"
        )
    return size


def _learns_positions(arguments: Arguments) -> bool:
    if arguments.has("use-rotary-position-embeddings"):  # an old name of rope
        return False
    return arguments.text("position-embedding-type", "learned_absolute") == "learned_absolute"


def _has_biases(arguments: Arguments) -> bool:
    """Returns whether linear layers have biases; `add_bias_linear` is the name in files of arguments."""
    return not arguments.has("disable-bias-linear") and not arguments.is_off("add-bias-linear")


def require_described(arguments: Arguments) -> None:
    """Raises OptionError if arguments without a default are missing; names them all."""
    needed = ["num-layers", "hidden-size", "num-attention-heads"]
    if _learns_positions(arguments):
        needed.append("max-position-embeddings")
    if not arguments.has("padded-vocab-size"):
        needed.append("vocab-size")
    missing = [flag for flag in needed if arguments.lacks(flag)]
    if missing:
        number = "a whole number above 0" if len(missing) == 1 else "whole numbers above 0"
        advice = ""
        if "vocab-size" in missing and arguments.has("tokenizer-type"):
            advice = "; the tokenizer is not read: append --vocab-size N"
        flags = ", ".join(f"--{flag}" for flag in missing)
        raise OptionError(f"{flags}: expected {number}, found nothing{advice}")


def check_divisions(arguments: Arguments, tensor_parallel: int, expert_parallel: int) -> None:
    """Raises OptionError if Megatron cannot split the model over its tensor- and expert-parallel ranks."""
    wholes = [("num-attention-heads", arguments.number("num-attention-heads"))]
    if arguments.has("padded-vocab-size"):
        wholes.append(("padded-vocab-size", arguments.number("padded-vocab-size")))
    if not arguments.has("num-experts"):
        wholes.append(("ffn-hidden-size", _ffn_size(arguments)))
    for flag, whole in wholes:
        if whole % tensor_parallel:
            raise OptionError(
                f"--{flag} {whole}: expected a multiple of the tensor-parallel size {tensor_parallel}"
            )
    groups = _groups(arguments)
    if groups % tensor_parallel and tensor_parallel % groups:
        raise OptionError(
            f"--num-query-groups {groups}: expected a multiple or a divisor of the tensor-parallel size "
            f"{tensor_parallel}"
        )
    if expert_parallel > 1 and not arguments.has("num-experts"):
        raise OptionError(f"expert parallel {expert_parallel}: expected a model with --num-experts")
    if expert_parallel > 1 and (experts := arguments.number("num-experts")) % expert_parallel:
        raise OptionError(
            f"--num-experts {experts}: expected a multiple of the expert-parallel size {expert_parallel}"
        )


def _padded_vocabulary(arguments: Arguments, tensor_parallel: int) -> int:
    if arguments.has("padded-vocab-size"):
        return arguments.number("padded-vocab-size")
    if arguments.has("no-pad-vocab-size"):
        raise OptionError("--no-pad-vocab-size: expected --padded-vocab-size with it, as Megatron does")
    multiple = arguments.number("make-vocab-size-divisible-by", 128) * tensor_parallel
    # It adds a token for the end of a document; NullTokenizer has added none since Megatron 0.18.
    extra = arguments.text("tokenizer-type", "") == "NullMultimodalTokenizer"
    return math.ceil((arguments.number("vocab-size") + extra) / multiple) * multiple


def _norm_size(arguments: Arguments) -> int:
    return 1 if arguments.text("normalization", "LayerNorm") == "RMSNorm" else 2


def _layers(arguments: Arguments) -> list[Parameters]:
    count = arguments.number("num-layers")
    if count > _MOST_LAYERS:
        raise OptionError(f"--num-layers {count}: expected at most {_MOST_LAYERS}")
    experts = arguments.number("num-experts") if arguments.has("num-experts") else 0
    shared = _attention(arguments)
    dense = shared + _mlp(arguments, _ffn_size(arguments))
    if not experts:
        return [dense] * count
    sparse = shared + _experts(arguments, experts)
    return [sparse if is_sparse else dense for is_sparse in _pattern(arguments, count)]


def _pattern(arguments: Arguments, count: int) -> list[bool]:
    """Returns which layers have experts, by --moe-layer-freq: a number N, or a list as Python writes it."""
    text = arguments.text("moe-layer-freq", "1")
    try:
        if "[" in text:
            found = [bool(one) for one in _product(text)]
        else:
            every = int(text)
            found = [layer % every == 0 for layer in range(count)]
    except (ValueError, SyntaxError, ZeroDivisionError, TypeError):
        found = []
    if len(found) != count:
        raise OptionError(
            f"--moe-layer-freq {text}: expected a number, or a list such as ([0]*1+[1]*{count - 1}) with "
            f"{count} elements"
        )
    return found


def _product(text: str) -> list[int]:
    """Evaluates sums and products of lists of numbers, as Megatron does. Raises ValueError."""

    def value(node: ast.expr) -> list[int] | int:
        if isinstance(node, ast.List):
            return [int(ast.literal_eval(one)) for one in node.elts]
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < 10_000:
            return node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
            if isinstance(left, list) and isinstance(right, int) and len(left) * right <= _MOST_LAYERS:
                return left * right
        raise ValueError("not a list")

    found = value(ast.parse(text, mode="eval").body)
    return found if isinstance(found, list) else []


def _attention(arguments: Arguments) -> Parameters:
    hidden, heads = arguments.number("hidden-size"), arguments.number("num-attention-heads")
    channels = arguments.number("kv-channels", max(hidden // heads, 1))
    queries, norms = heads * channels, _norm_size(arguments)
    projected = queries + 2 * _groups(arguments) * channels
    if arguments.has("attention-output-gate"):
        projected += queries
    biased = _has_biases(arguments)
    found = Parameters(tensor_parallel=hidden * (projected + queries), tensors=2)
    found += Parameters(
        replicated=2 * norms * hidden, tensors=2 * norms
    )  # before attention, and before the MLP
    if biased or arguments.has("add-qkv-bias"):
        found += Parameters(tensor_parallel=projected, tensors=1)
    if biased:
        found += Parameters(replicated=hidden, tensors=1)
    if arguments.has("qk-layernorm"):
        found += Parameters(replicated=2 * norms * channels, tensors=2 * norms)
    return found


def _groups(arguments: Arguments) -> int:
    if arguments.has("group-query-attention"):
        return arguments.number("num-query-groups", 1)
    return arguments.number("num-attention-heads")


def _ffn_size(arguments: Arguments) -> int:
    hidden = arguments.number("hidden-size")
    default = int((4 * hidden * 2 / 3) / 64) * 64 if arguments.has("swiglu") else 4 * hidden
    return arguments.number("ffn-hidden-size", default)


def _mlp(arguments: Arguments, ffn: int) -> Parameters:
    hidden = arguments.number("hidden-size")
    # The last is the name in files for --yaml-cfg.
    is_gated = any(map(arguments.has, ("swiglu", "quick-geglu", "gated-linear-unit")))
    first = ffn * (2 if is_gated else 1)
    found = Parameters(tensor_parallel=hidden * (first + ffn), tensors=3 if is_gated else 2)
    if _has_biases(arguments):
        found += Parameters(tensor_parallel=first, replicated=hidden, tensors=2)
    return found


def _experts(arguments: Arguments, count: int) -> Parameters:
    hidden = arguments.number("hidden-size")
    one = _mlp(arguments, arguments.number("moe-ffn-hidden-size", _ffn_size(arguments)))
    found = Parameters(experts=count * one.stored, tensors=count * one.tensors)
    found += Parameters(replicated=hidden * count, tensors=1)  # the router
    if arguments.has("moe-shared-expert-intermediate-size"):
        width = arguments.number("moe-shared-expert-intermediate-size")
        found += _mlp(arguments, width)
        if arguments.has("moe-shared-expert-gate"):
            found += Parameters(replicated=hidden, tensors=1)
    return found
