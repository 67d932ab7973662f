"""A transformer by its sizes, as people know them before there is a model: its tensors and their FLOPs.

Without optional keys it is the decoder of GPT-2: learnt positions, heads that are tied to the embedding, biases and
layer norms.

    elements    12 L h^2 + 13 L h + 2 h + (V + s) h
    FLOPs       24 s L h^2 + 4 s^2 L h + 2 s h V     of the forward pass of a sample, without a causal mask

Llama differs in seven keys: an MLP of three matrices, fewer heads of keys and values than of queries, RMS norms, no
biases, rotary positions, a head of its own, and queries, keys and values in matrices of their own.

Source:
    Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (elements); Narayanan et al., Efficient
    Large-Scale Language Model Training on GPU Clusters, SC 2021, arXiv 2104.04473, appendix (FLOPs); Touvron et al.,
    Llama 2, arXiv 2307.09288, and Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783 (the optional keys).
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self, TypeAlias, final

from pydantic import Field, model_validator

from simdist.settings.base import Fault, Settings, refuse
from simdist.settings.units import Whole

#: A tensor, by the attributes of `simdist.scenario.workload.Tensor`.
Record: TypeAlias = dict[str, str | int | float]
_Size: TypeAlias = Annotated[Whole, Field(ge=1, le=10_000_000)]


@final
class Transformer(Settings):
    """A decoder of transformer layers, one sample of which is a sequence.

    Args:
        layers: Number of layers.
        hidden: Width of the residual stream.
        heads: Attention heads of a layer.
        vocabulary: Tokens that there are.
        sequence: Tokens of a sample.
        kv_heads: Heads of keys and values; as many as `heads` if absent.
        head_dim: Width of a head; `hidden / heads` if absent.
        intermediate: Width of the MLP; `4 * hidden` if absent.
        gated: The MLP has a third matrix, whose output multiplies that of the first (SwiGLU).
        norm: `layer`: with a weight and a bias. `rms`: with a weight.
        biases: Of matrices and layer norms: of all, of queries, keys and values only, or of none.
        query_key_norm: Each layer normalizes queries and keys, head by head.
        fused_qkv: Queries, keys and values come from one matrix.
        positions: Rows of the learnt embedding of positions; as many as `sequence` if absent. 0 if positions are not
            learnt (rotary embeddings, ALiBi).
        tied: The head is the embedding.

    >>> small = Transformer(layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024)
    >>> sum(each["count"] for each in small.tensors())
    124439808
    """

    layers: Annotated[Whole, Field(ge=1, le=1000)]
    hidden: _Size
    heads: _Size
    vocabulary: _Size
    sequence: _Size
    kv_heads: _Size | None = None
    head_dim: _Size | None = None
    intermediate: _Size | None = None
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    biases: Literal["all", "qkv", "none"] = "all"
    query_key_norm: bool = False
    fused_qkv: bool = True
    positions: Annotated[Whole, Field(ge=0, le=10_000_000)] | None = None
    tied: bool = True

    @model_validator(mode="after")
    def _divides(self) -> Self:
        refuse("Transformer", list(self._faults()))
        return self

    def _faults(self) -> Iterator[Fault]:
        if self.head_dim is None and self.hidden % self.heads:
            yield ("heads",), f"{self.heads} do not divide the {self.hidden} of hidden: change one, or write head_dim"
        if self.kv_heads and self.heads % self.kv_heads:
            yield ("kv_heads",), f"{self.kv_heads} do not divide the {self.heads} of heads"
        if self.positions and self.positions < self.sequence:
            yield ("positions",), f"{self.positions} are fewer than the {self.sequence} tokens of sequence"

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def key_width(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.query_width // self.heads * (self.kv_heads or self.heads)

    def tensors(self) -> list[Record]:
        """Return its tensors in forward order. Names of a layer's tensors begin with `blocks.` and its number."""
        n_positions = self.sequence if self.positions is None else self.positions
        logits_flops = 2.0 * self.sequence * self.hidden * self.vocabulary
        found = [_matrix("embedding", self.vocabulary, self.hidden)]
        if n_positions:
            found.append(_matrix("positions", n_positions, self.hidden))
        for number in range(self.layers):
            found += self._layer(f"blocks.{number}")
        found += self._norm("norm", self.hidden, flops=logits_flops if self.tied else 0.0)
        if not self.tied:
            found.append(_matrix("head", self.vocabulary, self.hidden, flops=logits_flops))
        return found

    def _layer(self, name: str) -> Iterator[Record]:
        attention_flops = 4.0 * self.sequence**2 * self.query_width  # scores, and the sums of values that they weight
        yield from self._norm(f"{name}.norm1", self.hidden)
        yield from self._projections(f"{name}.attention")
        yield from self._linear(f"{name}.attention.out", self.hidden, self.query_width, more_flops=attention_flops)
        yield from self._norm(f"{name}.norm2", self.hidden)
        width = self.intermediate or 4 * self.hidden
        if self.gated:
            yield from self._linear(f"{name}.mlp.gate", width, self.hidden)
        yield from self._linear(f"{name}.mlp.in", width, self.hidden)
        yield from self._linear(f"{name}.mlp.out", self.hidden, width)

    def _projections(self, name: str) -> Iterator[Record]:
        widths = {"query": self.query_width, "key": self.key_width, "value": self.key_width}
        if self.fused_qkv:
            widths = {"in": sum(widths.values())}
        for part, width in widths.items():
            yield from self._linear(f"{name}.{part}", width, self.hidden, is_qkv=True)
        if self.query_key_norm:
            for part in ("query", "key"):
                yield from self._norm(f"{name}.{part}_norm", self.query_width // self.heads)

    def _linear(
        self, name: str, n_out: int, n_in: int, *, is_qkv: bool = False, more_flops: float = 0.0
    ) -> Iterator[Record]:
        yield _matrix(f"{name}.weight", n_out, n_in, flops=2.0 * self.sequence * n_out * n_in + more_flops)
        if self.biases == "all" or (self.biases == "qkv" and is_qkv):
            yield {"name": f"{name}.bias", "count": n_out}

    def _norm(self, name: str, width: int, *, flops: float = 0.0) -> Iterator[Record]:
        yield {"name": f"{name}.weight", "count": width, "flops": flops}
        if self.norm == "layer" and self.biases == "all":
            yield {"name": f"{name}.bias", "count": width}


def _matrix(name: str, n_rows: int, n_columns: int, *, flops: float = 0.0) -> Record:
    return {"name": name, "count": n_rows * n_columns, "flops": flops, "rows": n_rows}
