"""A transformer by its sizes, as people know them before there is a model: its tensors and their FLOPs.

It is the decoder of GPT-2: learnt positions, heads that are tied to the embedding, biases and layer norms.

    elements    12 L h^2 + 13 L h + 2 h + (V + s) h
    FLOPs       24 s L h^2 + 4 s^2 L h + 2 s h V     of the forward pass of a sample, without a causal mask

Source:
    Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (elements); Narayanan et al., Efficient
    Large-Scale Language Model Training on GPU Clusters, SC 2021, arXiv 2104.04473, appendix (FLOPs).
"""

from collections.abc import Iterator
from typing import Annotated, Self, TypeAlias, final

from pydantic import Field, model_validator

from simdist.settings.base import Settings, refuse
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
        heads: Attention heads of a layer; they change no number, but must divide `hidden`.
        vocabulary: Tokens that there are.
        sequence: Tokens of a sample.

    >>> small = Transformer(layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024)
    >>> sum(each["count"] for each in small.tensors())
    124439808
    """

    layers: Annotated[Whole, Field(ge=1, le=1000)]
    hidden: _Size
    heads: _Size
    vocabulary: _Size
    sequence: _Size

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden % self.heads:
            refuse("Transformer", [(("heads",), f"{self.heads} do not divide the {self.hidden} of hidden")])
        return self

    def tensors(self) -> list[Record]:
        """Return its tensors in forward order."""
        logits_flops = 2.0 * self.sequence * self.hidden * self.vocabulary
        return [
            _matrix("embedding", self.vocabulary, self.hidden),
            _matrix("positions", self.sequence, self.hidden),
            *(tensor for number in range(self.layers) for tensor in self._layer(f"layer{number}")),
            *self._norm("norm", flops=logits_flops),
        ]

    def _layer(self, name: str) -> Iterator[Record]:
        hidden = self.hidden
        attention_flops = 4.0 * self.sequence**2 * hidden  # scores, and the sums of values that they weight
        yield from self._norm(f"{name}.norm1")
        yield from self._linear(f"{name}.attention.in", 3 * hidden, hidden)
        yield from self._linear(f"{name}.attention.out", hidden, hidden, more_flops=attention_flops)
        yield from self._norm(f"{name}.norm2")
        yield from self._linear(f"{name}.mlp.in", 4 * hidden, hidden)
        yield from self._linear(f"{name}.mlp.out", hidden, 4 * hidden)

    def _linear(self, name: str, n_out: int, n_in: int, *, more_flops: float = 0.0) -> Iterator[Record]:
        yield _matrix(f"{name}.weight", n_out, n_in, flops=2.0 * self.sequence * n_out * n_in + more_flops)
        yield {"name": f"{name}.bias", "count": n_out}

    def _norm(self, name: str, *, flops: float = 0.0) -> Iterator[Record]:
        yield {"name": f"{name}.weight", "count": self.hidden, "flops": flops}
        yield {"name": f"{name}.bias", "count": self.hidden}


def _matrix(name: str, n_rows: int, n_columns: int, *, flops: float = 0.0) -> Record:
    return {"name": name, "count": n_rows * n_columns, "flops": flops, "rows": n_rows}
