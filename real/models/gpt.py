"""GPT-2: a transformer that predicts the next token."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

_INIT_STD = 0.02  # Radford et al. 2018, section 4.1


class _MatrixProduct(nn.Module):
    """A @ B without parameters; it is a module only so that hooks see it."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product."""
        return a @ b


class ScaledDotProduct(nn.Module):
    """softmax(Q K^T / sqrt(width)) V without parameters; it is a module only so that hooks see it.

    Args:
        causal: A position sees only itself and earlier positions.
    """

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the mixed values; all shapes are `[batch, heads, positions, width]`."""
        return functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)


class _Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.project = nn.Sequential(OrderedDict(qkv=nn.Linear(width, 3 * width)))
        self.mix = ScaledDotProduct(causal=True)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        mixed: Tensor = self.output(self.mix(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class _Layer(nn.Module):
    """Attention and feed-forward network, each with a normalisation before it and added to its input."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, n_heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Gpt(nn.Module):
    """The architecture of GPT-2. The language-model head shares the token embedding (tied).

    There is no dropout, so that equal seeds give equal values on all devices.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.

    Args:
        n_tokens: Size of the vocabulary.
        length: Number of positions; a sample may be shorter.
        width: Width of the residual stream.
        n_layers: Number of blocks of attention and feed-forward.
        n_heads: Divides `width`.
    """

    def __init__(self, *, n_tokens: int, length: int, width: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(n_tokens, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(_Layer(width, n_heads) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = _MatrixProduct()
        self._initialize()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, length, n_tokens]` of the token after each of `tokens`, int64 `[batch, length]`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.layers(self.token(tokens) + self.position(positions)))
        logits: Tensor = self.logits(x, self.token.weight.T)
        return logits

    def _initialize(self) -> None:
        """Draw small weights, and smaller ones for layers that add to the residual stream (GPT-2, section 2.3)."""
        std_of_sum = _INIT_STD / (2 * len(self.layers)) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                adds = name.endswith(("attention.output", "feed_forward.2"))
                nn.init.normal_(module.weight, std=std_of_sum if adds else _INIT_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


def feed_forward(width: int) -> nn.Sequential:
    """Return the feed-forward network of a transformer layer, 4 x width inside."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
