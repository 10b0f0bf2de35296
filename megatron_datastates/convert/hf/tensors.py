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


class _Layer:
    """Makes the entries of one layer, or of what is in none."""

    def __init__(self, a: Arguments, number: int | None = None, prefix: str = "") -> None:
        self._a, self._number, self._prefix = a, number, prefix

    def entry(
        self,
        name: str | tuple[str, ...],
        shape: tuple[int, ...],
        names: Sequence[str],
        split: Split = whole,
        *,
        transposed: bool = False,
        expert: int | None = None,
        zero_centered: bool = False,
        padded: bool = False,
    ) -> Entry:
        """Returns a place, and the tensors that its rows make: `names` has one for each part of `split`."""
        aliases = name if isinstance(name, tuple) else (name,)
        place = Place(aliases, shape, self._number, expert, zero_centered, padded)
        parts = zip(names, split(self._a, shape[0]), strict=True)
        return place, [Rows(f"{self._prefix}{one}", runs, transposed) for one, runs in parts]

    def norm(self, prefixes: tuple[str, ...], size: int, hf_name: str) -> Iterator[Entry]:
        """Yields the entries of a norm's weight and, if it has one, its bias."""
        for end in ["weight"] if self._a.normalization == "RMSNorm" else ["weight", "bias"]:
            names = tuple(prefix + end for prefix in prefixes)
            centered = self._a.apply_layernorm_1p and end == "weight"
            yield self.entry(names, (size,), [f"{hf_name}.{end}"], zero_centered=centered)


# A norm before a linear layer is a part of it with Transformer Engine, and Megatron stores its own layers so,
# too. Before experts, Transformer Engine's norm stands by itself, and Megatron's own does not.
_INPUT_NORM = ("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
_NORM_BEFORE_MLP = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def _llama_attention(a: Arguments, layer: _Layer) -> Iterator[Entry]:
    width = a.num_attention_heads * a.kv_channels
    rows = width + 2 * a.num_query_groups * a.kv_channels
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    yield layer.entry(
        "self_attention.linear_qkv.weight", (rows, a.hidden_size), [f"{part}.weight" for part in parts], qkv
    )
    if a.add_qkv_bias:
        names = [f"{part}.bias" for part in parts]
        yield layer.entry("self_attention.linear_qkv.bias", (rows,), names, qkv)
    yield layer.entry(
        "self_attention.linear_proj.weight", (a.hidden_size, width), ["self_attn.o_proj.weight"]
    )
    if a.add_bias_linear:
        yield layer.entry("self_attention.linear_proj.bias", (a.hidden_size,), ["self_attn.o_proj.bias"])
    if a.qk_layernorm:
        yield from layer.norm(("self_attention.q_layernorm.",), a.kv_channels, "self_attn.q_norm")
        yield from layer.norm(("self_attention.k_layernorm.",), a.kv_channels, "self_attn.k_norm")


def _gated_mlp(
    a: Arguments, layer: _Layer, name: str, size: int, hf: Sequence[str], expert: int | None = None
) -> Iterator[Entry]:
    """Yields the entries of a gated MLP; `hf` are the names of the gate, of what it gates, and of the end."""
    up = (2 * size, a.hidden_size)
    names = [f"{one}.weight" for one in hf]
    yield layer.entry(f"{name}linear_fc1.weight", up, names[:2], halves, expert=expert)
    yield layer.entry(f"{name}linear_fc2.weight", (a.hidden_size, size), names[2:], expert=expert)
    if a.add_bias_linear:
        names = [f"{one}.bias" for one in hf]
        yield layer.entry(f"{name}linear_fc1.bias", (2 * size,), names[:2], halves, expert=expert)
        yield layer.entry(f"{name}linear_fc2.bias", (a.hidden_size,), names[2:], expert=expert)


def _llama_like(a: Arguments, mixtral: bool = False) -> Iterator[Entry]:
    for number, has_experts in enumerate(a.has_experts):
        layer = _Layer(a, number, f"model.layers.{number}.")
        yield from layer.norm(_INPUT_NORM, a.hidden_size, "input_layernorm")
        yield from _llama_attention(a, layer)
        norm = tuple(reversed(_NORM_BEFORE_MLP)) if has_experts else _NORM_BEFORE_MLP
        yield from layer.norm(norm, a.hidden_size, "post_attention_layernorm")
        if has_experts:
            yield from _experts(a, layer, mixtral)
        else:
            yield from _gated_mlp(a, layer, "mlp.", a.ffn_hidden_size, _under("mlp", _PROJECTIONS))
    yield from _around(a, "model.embed_tokens.weight", "model.norm")


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _under(prefix: str, names: Sequence[str]) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


def _experts(a: Arguments, layer: _Layer, mixtral: bool) -> Iterator[Entry]:
    assert a.num_experts is not None and a.moe_ffn_hidden_size is not None, "has_experts is set"
    block = "block_sparse_moe" if mixtral else "mlp"
    projections = ("w1", "w3", "w2") if mixtral else _PROJECTIONS
    yield layer.entry("mlp.router.weight", (a.num_experts, a.hidden_size), [f"{block}.gate.weight"])
    for expert in range(a.num_experts):
        names = _under(f"{block}.experts.{expert}", projections)
        yield from _gated_mlp(a, layer, EXPERTS, a.moe_ffn_hidden_size, names, expert)
    if a.moe_shared_expert_intermediate_size:
        size = a.moe_shared_expert_intermediate_size
        yield from _gated_mlp(
            a, layer, "mlp.shared_experts.", size, _under("mlp.shared_expert", _PROJECTIONS)
        )
        yield layer.entry(
            "mlp.shared_experts.gate_weight", (1, a.hidden_size), ["mlp.shared_expert_gate.weight"]
        )


def _around(a: Arguments, embedding: str, norm: str) -> Iterator[Entry]:
    """Yields the entries of what is before and after the layers."""
    vocabulary, around = (a.vocab_size, a.hidden_size), _Layer(a)
    yield around.entry(EMBEDDING, vocabulary, [embedding], padded=True)
    yield from around.norm(("decoder.final_layernorm.",), a.hidden_size, norm)
    if a.untie_embeddings_and_output_weights:
        yield around.entry("output_layer.weight", vocabulary, ["lm_head.weight"], padded=True)


def _gpt2(a: Arguments) -> Iterator[Entry]:
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
            yield layer.entry(f"{name}.weight", shape, [f"{hf_name}.weight"], split, transposed=True)
            yield layer.entry(f"{name}.bias", shape[:1], [f"{hf_name}.bias"], split)
    positions = (a.max_position_embeddings, hidden)
    yield _Layer(a).entry("embedding.position_embeddings.weight", positions, ["transformer.wpe.weight"])
    yield from _around(a, "transformer.wte.weight", "transformer.ln_f")


def entries(model_type: str, a: Arguments) -> Iterator[Entry]:
    """Yields, for each tensor of Megatron's model, the tensors of Hugging Face's that its rows make."""
    return _gpt2(a) if model_type == "gpt2" else _llama_like(a, mixtral=model_type == "mixtral")
