"""A transformer by its sizes, as people know them before there is a model: its tensors and their FLOPs.

Without optional keys it is the decoder of GPT-2: learnt positions, heads that are tied to the embedding, biases and
layer norms.

    elements    12 L h^2 + 13 L h + 2 h + (V + s) h
    FLOPs       24 s L h^2 + 4 s^2 L h + 2 s h V     of the forward pass of a sample, without a causal mask

A layer leaves for its backward pass, per token, with flash attention and without dropout:

    elements    6 h + 2 k + 4 f     inputs of both norms, of the queries and of the MLP; queries, keys and values; the
                                    output of attention; of an MLP with a gate four times its width f, else twice
    float32     a number for each head

The loss takes logits in float32. As its backward pass begins, there are log-probabilities and two gradients.

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
_Record: TypeAlias = dict[str, str | int | float]
_N_OF_LOSS = 3  # float32 numbers for each logit as the backward pass begins
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
        layer_norms: Norms of a layer. 1: attention and MLP read the same one (Falcon, Phi). 4: their outputs are
            normalized, too (Gemma 2).
        biases: Of matrices and layer norms: of all, of the matrices of attention only, of queries, keys and values
            only, or of none.
        norm_biases: Layer norms have a bias; if absent, they do if all matrices do.
        query_key_norm: Each layer normalizes queries and keys: `true` head by head with the same weights, `whole` all
            heads together (OLMo 2).
        fused_qkv: Queries, keys and values come from one matrix.
        positions: Rows of the learnt embedding of positions; as many as `sequence` if absent. 0 if positions are not
            learnt (rotary embeddings, ALiBi).
        tied: The head is the embedding.
        head_bias: The head has a bias.
        masked: An encoder that predicts masked tokens (BERT): a norm follows the embedding instead of the blocks, and a
            matrix with a norm precedes the head.
        encoder_count: Parameters of an encoder in front, such as one of images. Their computation is not counted.

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
    layer_norms: Literal[1, 2, 4] = 2
    biases: Literal["all", "attention", "qkv", "none"] = "all"
    norm_biases: bool | None = None
    query_key_norm: bool | Literal["whole"] = False
    fused_qkv: bool = True
    positions: Annotated[Whole, Field(ge=0, le=10_000_000)] | None = None
    tied: bool = True
    head_bias: bool = False
    masked: bool = False
    encoder_count: Annotated[Whole, Field(ge=0, le=10**13)] = 0

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

    def tensors(self) -> list[_Record]:
        """Return its tensors in forward order. Names of a layer's tensors begin with `blocks.` and its number."""
        found = list(self._before())
        for number in range(self.layers):
            found += self._layer(f"blocks.{number}")
        return [*found, *self._after()]

    def _before(self) -> Iterator[_Record]:
        """Yield what stands before the blocks."""
        n_positions = self.sequence if self.positions is None else self.positions
        if self.encoder_count:
            yield {"name": "encoder", "count": self.encoder_count}
        yield _matrix("embedding", self.vocabulary, self.hidden)
        if n_positions:
            yield _matrix("positions", n_positions, self.hidden)
        if self.masked:
            yield from self._norm("embedding.norm", self.hidden, activations=self.sequence * self.hidden)

    def _after(self) -> Iterator[_Record]:
        """Yield what stands after the blocks. The first tensor of a tied head states the FLOPs of the logits."""
        logits_flops = 2.0 * self.sequence * self.hidden * self.vocabulary
        of_loss = _N_OF_LOSS * self.sequence * self.vocabulary
        width = self.sequence * self.hidden
        tied: _Record = {"flops": logits_flops, "activations": 2 * width, "float32_activations": of_loss}
        if self.masked:
            yield from self._linear("head.in", self.hidden, self.hidden, activations=width)
        norm, *bias = self._norm("head.norm" if self.masked else "norm", self.hidden, activations=width)
        yield norm | (tied if self.tied else {})
        yield from bias
        if not self.tied:
            head = _matrix(
                "head.weight" if self.head_bias else "head", self.vocabulary, self.hidden, flops=logits_flops
            )
            yield head | {"activations": width, "float32_activations": of_loss}
        if self.head_bias:
            yield {"name": "head.bias", "count": self.vocabulary}

    def _layer(self, name: str) -> Iterator[_Record]:
        attention_flops = 4.0 * self.sequence**2 * self.query_width  # scores, and the sums of values that they weight
        stream = self.sequence * self.hidden
        attended = self.sequence * 2 * (self.query_width + self.key_width)  # queries, keys, values and the output
        yield from self._norm(f"{name}.norm1", self.hidden, activations=stream)
        yield from self._projections(f"{name}.attention")
        out = self._linear(
            f"{name}.attention.out",
            self.hidden,
            self.query_width,
            bias_of="attention",
            more_flops=attention_flops,
            activations=attended,
        )
        yield next(out) | {"float32_activations": self.sequence * self.heads}
        yield from out
        if self.layer_norms == 4:
            yield from self._norm(f"{name}.attention.norm", self.hidden, activations=stream)
        if self.layer_norms > 1:
            yield from self._norm(f"{name}.norm2", self.hidden, activations=stream)
        yield from self._mlp(f"{name}.mlp", stream if self.layer_norms > 1 else 0)
        if self.layer_norms == 4:
            yield from self._norm(f"{name}.mlp.norm", self.hidden, activations=stream)

    def _mlp(self, name: str, n_inputs: int) -> Iterator[_Record]:
        """Yield the matrices of an MLP that leaves so many inputs for its backward pass."""
        width = self.intermediate or 4 * self.hidden
        inner = self.sequence * width
        if self.gated:
            yield from self._linear(f"{name}.gate", width, self.hidden, activations=n_inputs)
            yield from self._linear(f"{name}.in", width, self.hidden)
            yield from self._linear(f"{name}.out", self.hidden, width, activations=4 * inner)
        else:
            yield from self._linear(f"{name}.in", width, self.hidden, activations=n_inputs)
            yield from self._linear(f"{name}.out", self.hidden, width, activations=2 * inner)

    def _projections(self, name: str) -> Iterator[_Record]:
        widths = {"query": self.query_width, "key": self.key_width, "value": self.key_width}
        if self.fused_qkv:
            widths = {"in": sum(widths.values())}
        left = self.sequence * self.hidden  # the input of all of them, once
        for part, width in widths.items():
            yield from self._linear(f"{name}.{part}", width, self.hidden, bias_of="qkv", activations=left)
            left = 0
        if self.query_key_norm:
            for part, n_numbers in (("query", self.query_width), ("key", self.key_width)):
                width = n_numbers if self.query_key_norm == "whole" else self.query_width // self.heads
                yield from self._norm(f"{name}.{part}_norm", width, activations=self.sequence * n_numbers)

    def _linear(
        self,
        name: str,
        n_out: int,
        n_in: int,
        *,
        bias_of: Literal["attention", "qkv"] | None = None,
        more_flops: float = 0.0,
        activations: int = 0,
    ) -> Iterator[_Record]:
        flops = 2.0 * self.sequence * n_out * n_in + more_flops
        yield _matrix(f"{name}.weight", n_out, n_in, flops=flops, activations=activations)
        has_bias = {"all": True, "attention": bias_of is not None, "qkv": bias_of == "qkv", "none": False}
        if has_bias[self.biases]:
            yield {"name": f"{name}.bias", "count": n_out}

    def _norm(self, name: str, width: int, *, activations: int = 0) -> Iterator[_Record]:
        yield {"name": f"{name}.weight", "count": width, "flops": 0.0, "activations": activations}
        has_bias = self.biases == "all" if self.norm_biases is None else self.norm_biases
        if self.norm == "layer" and has_bias:
            yield {"name": f"{name}.bias", "count": width}


def _matrix(name: str, n_rows: int, n_columns: int, *, flops: float = 0.0, activations: int = 0) -> _Record:
    return {"name": name, "count": n_rows * n_columns, "flops": flops, "rows": n_rows, "activations": activations}
