"""Which rows of which tensor of Megatron make each tensor of Hugging Face's.

Every tensor of Hugging Face's consists of whole rows of one tensor of Megatron's, in another order at most,
perhaps transposed; every row of a tensor of Megatron's is in one of them. So one table serves both ways, and
no element changes. (With --apply-layernorm-1p, 1 is added to the elements of norms.)

Sources: Megatron-LM's tools/checkpoint/loader_llama_mistral.py and Megatron-Bridge's param_mapping.py for the
order of queries, keys and values; transformer_block.py, mlp.py and moe/experts.py for Megatron's keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from megatron_datastates.convert.hf.arguments import Arguments

Runs = list[tuple[int, int]]  # (first row, number of rows)
Split = Callable[[Arguments, int], list[Runs]]  # of a tensor with this number of rows
LAYERS = "decoder.layers."


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor of Megatron's model: of one layer and one expert, or of none."""

    names: tuple[str, ...]  # after `decoder.layers.N.` if it is of a layer; all names that it may have
    shape: tuple[int, ...]
    layer: int | None = None
    expert: int | None = None
    zero_centered: bool = False  # 1 is to be added
    padded: bool = False  # more rows may follow


@dataclasses.dataclass(frozen=True)
class Rows:
    """A tensor of Hugging Face's, made of rows of a place."""

    name: str
    runs: Runs
    transposed: bool = False


Entry = tuple[Place, list[Rows]]
EXPERTS = "mlp.experts.experts."
EMBEDDING = "embedding.word_embeddings.weight"


def whole(a: Arguments, rows: int) -> list[Runs]:
    """Returns all rows."""
    return [[(0, rows)]]


def halves(a: Arguments, rows: int) -> list[Runs]:
    """Returns the rows of the gate, and those of what it gates."""
    return [[(0, rows // 2)], [(rows // 2, rows // 2)]]


def qkv(a: Arguments, rows: int) -> list[Runs]:
    """Returns the rows of queries, of keys and of values.

    Megatron stores, for each group of queries, its queries and then its one key and value.
    """
    queries = a.num_attention_heads // a.num_query_groups
    starts = [group * (queries + 2) * a.kv_channels for group in range(a.num_query_groups)]
    return [
        [(start + first * a.kv_channels, heads * a.kv_channels) for start in starts]
        for first, heads in ((0, queries), (queries, 1), (queries + 1, 1))
    ]


def qkv_in_one(a: Arguments, rows: int) -> list[Runs]:
    """Returns the rows of queries, then of keys, then of values, as one tensor."""
    return [[run for part in qkv(a, rows) for run in part]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of one tensor of Megatron's; `names` has one name for each part of `split`."""

    place: Place
    names: Sequence[str]
    split: Split = whole
    transposed: bool = False

    def entry(self, a: Arguments) -> Entry:
        """Returns the place, and the tensors that its rows make."""
        parts = zip(self.names, self.split(a, self.place.shape[0]), strict=True)
        return self.place, [Rows(name, runs, self.transposed) for name, runs in parts]


class _Layer:
    """Makes rules for one layer."""

    def __init__(self, a: Arguments, number: int, prefix: str) -> None:
        self._a, self._number, self._prefix = a, number, prefix

    def rule(
        self,
        name: str | tuple[str, ...],
        shape: tuple[int, ...],
        names: Sequence[str],
        split: Split = whole,
        *,
        transposed: bool = False,
        expert: int | None = None,
    ) -> Rule:
        aliases = name if isinstance(name, tuple) else (name,)
        place = Place(aliases, shape, self._number, expert)
        return Rule(place, [f"{self._prefix}{one}" for one in names], split, transposed)

    def norm(self, name: str | tuple[str, ...], size: int, hf_name: str) -> Iterator[Rule]:
        """Yields the rules of a norm's weight and, if it has one, its bias."""
        ends = ["weight"] if self._a.normalization == "RMSNorm" else ["weight", "bias"]
        for end in ends:
            one = self.rule(_ending(name, end), (size,), [f"{hf_name}.{end}"])
            centered = self._a.apply_layernorm_1p and end == "weight"
            yield dataclasses.replace(one, place=dataclasses.replace(one.place, zero_centered=centered))


def _ending(name: str | tuple[str, ...], end: str) -> tuple[str, ...]:
    return tuple(one + end for one in ((name,) if isinstance(name, str) else name))


# A norm before a linear layer is a part of it with Transformer Engine, and Megatron stores its own layers so,
# too. Before experts, Transformer Engine's norm stands by itself, and Megatron's own does not.
_INPUT_NORM = ("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
_NORM_BEFORE_MLP = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def _llama_attention(a: Arguments, layer: _Layer) -> Iterator[Rule]:
    width = a.num_attention_heads * a.kv_channels
    rows = width + 2 * a.num_query_groups * a.kv_channels
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    yield layer.rule(
        "self_attention.linear_qkv.weight", (rows, a.hidden_size), [f"{part}.weight" for part in parts], qkv
    )
    if a.add_qkv_bias:
        names = [f"{part}.bias" for part in parts]
        yield layer.rule("self_attention.linear_qkv.bias", (rows,), names, qkv)
    yield layer.rule("self_attention.linear_proj.weight", (a.hidden_size, width), ["self_attn.o_proj.weight"])
    if a.add_bias_linear:
        yield layer.rule("self_attention.linear_proj.bias", (a.hidden_size,), ["self_attn.o_proj.bias"])
    if a.qk_layernorm:
        yield from layer.norm("self_attention.q_layernorm.", a.kv_channels, "self_attn.q_norm")
        yield from layer.norm("self_attention.k_layernorm.", a.kv_channels, "self_attn.k_norm")


def _gated_mlp(
    a: Arguments, layer: _Layer, name: str, size: int, hf: Sequence[str], expert: int | None = None
) -> Iterator[Rule]:
    """Yields the rules of a gated MLP; `hf` are the names of the gate, of what it gates, and of the end."""
    up = (2 * size, a.hidden_size)
    names = [f"{one}.weight" for one in hf]
    yield layer.rule(f"{name}linear_fc1.weight", up, names[:2], halves, expert=expert)
    yield layer.rule(f"{name}linear_fc2.weight", (a.hidden_size, size), names[2:], expert=expert)
    if a.add_bias_linear:
        names = [f"{one}.bias" for one in hf]
        yield layer.rule(f"{name}linear_fc1.bias", (2 * size,), names[:2], halves, expert=expert)
        yield layer.rule(f"{name}linear_fc2.bias", (a.hidden_size,), names[2:], expert=expert)


def _llama_like(a: Arguments, mixtral: bool = False) -> Iterator[Rule]:
    prefix = "model."
    for number, has_experts in enumerate(a.has_experts):
        layer = _Layer(a, number, f"{prefix}layers.{number}.")
        yield from layer.norm(_INPUT_NORM, a.hidden_size, "input_layernorm")
        yield from _llama_attention(a, layer)
        norm = tuple(reversed(_NORM_BEFORE_MLP)) if has_experts else _NORM_BEFORE_MLP
        yield from layer.norm(norm, a.hidden_size, "post_attention_layernorm")
        if has_experts:
            yield from _experts(a, layer, mixtral)
        else:
            yield from _gated_mlp(a, layer, "mlp.", a.ffn_hidden_size, _under("mlp", _PROJECTIONS))
    yield from _around(a, f"{prefix}embed_tokens.weight", f"{prefix}norm")


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _under(prefix: str, names: Sequence[str]) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


def _experts(a: Arguments, layer: _Layer, mixtral: bool) -> Iterator[Rule]:
    assert a.num_experts is not None and a.moe_ffn_hidden_size is not None, "has_experts is set"
    block = "block_sparse_moe" if mixtral else "mlp"
    projections = ("w1", "w3", "w2") if mixtral else _PROJECTIONS
    yield layer.rule("mlp.router.weight", (a.num_experts, a.hidden_size), [f"{block}.gate.weight"])
    for expert in range(a.num_experts):
        names = _under(f"{block}.experts.{expert}", projections)
        yield from _gated_mlp(a, layer, EXPERTS, a.moe_ffn_hidden_size, names, expert)
    if a.moe_shared_expert_intermediate_size:
        size = a.moe_shared_expert_intermediate_size
        yield from _gated_mlp(
            a, layer, "mlp.shared_experts.", size, _under("mlp.shared_expert", _PROJECTIONS)
        )
        yield layer.rule(
            "mlp.shared_experts.gate_weight", (1, a.hidden_size), ["mlp.shared_expert_gate.weight"]
        )


def _around(a: Arguments, embedding: str, norm: str) -> Iterator[Rule]:
    """Yields the rules of what is before and after the layers."""
    vocabulary = (a.vocab_size, a.hidden_size)
    yield Rule(Place((EMBEDDING,), vocabulary, padded=True), [embedding])
    for end in ["weight"] if a.normalization == "RMSNorm" else ["weight", "bias"]:
        centered = a.apply_layernorm_1p and end == "weight"
        place = Place((f"decoder.final_layernorm.{end}",), (a.hidden_size,), zero_centered=centered)
        yield Rule(place, [f"{norm}.{end}"])
    if a.untie_embeddings_and_output_weights:
        yield Rule(Place(("output_layer.weight",), vocabulary, padded=True), ["lm_head.weight"])


def _gpt2(a: Arguments) -> Iterator[Rule]:
    hidden, inner = a.hidden_size, a.ffn_hidden_size
    linear: list[tuple[str, str, tuple[int, int], Split]] = [
        ("self_attention.linear_qkv", "attn.c_attn", (3 * hidden, hidden), qkv_in_one),
        ("self_attention.linear_proj", "attn.c_proj", (hidden, hidden), whole),
        ("mlp.linear_fc1", "mlp.c_fc", (inner, hidden), whole),
        ("mlp.linear_fc2", "mlp.c_proj", (hidden, inner), whole),
    ]
    for number in range(a.num_layers):
        layer = _Layer(a, number, f"transformer.h.{number}.")
        yield from layer.norm(_INPUT_NORM, hidden, "ln_1")
        yield from layer.norm(_NORM_BEFORE_MLP, hidden, "ln_2")
        for name, hf_name, shape, split in linear:
            yield layer.rule(f"{name}.weight", shape, [f"{hf_name}.weight"], split, transposed=True)
            yield layer.rule(f"{name}.bias", shape[:1], [f"{hf_name}.bias"], split)
    positions = Place(("embedding.position_embeddings.weight",), (a.max_position_embeddings, hidden))
    yield Rule(positions, ["transformer.wpe.weight"])
    yield from _around(a, "transformer.wte.weight", "transformer.ln_f")


def entries(model_type: str, a: Arguments) -> Iterator[Entry]:
    """Yields, for each tensor of Megatron's model, the tensors of Hugging Face's that its rows make."""
    rules = _gpt2(a) if model_type == "gpt2" else _llama_like(a, mixtral=model_type == "mixtral")
    return (rule.entry(a) for rule in rules)
