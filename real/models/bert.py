"""BERT: a transformer encoder that sees the whole text."""

import torch
from torch import Tensor, nn

from real.models.gpt import ScaledDotProduct, feed_forward

_INIT_STD = 0.02  # as in GPT-2; Devlin et al. do not state theirs


class _Layer(nn.Module):
    """Self-attention and a feed-forward network, each added to its input and normalised after."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention = nn.ModuleDict(
            {
                "project": nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")}),
                "mix": ScaledDotProduct(causal=False),
                "output": nn.Linear(width, width),
            }
        )
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width)
        self.feed_forward_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self._attend(x))
        y: Tensor = self.feed_forward_norm(x + self.feed_forward(x))
        return y

    def _attend(self, x: Tensor) -> Tensor:
        project, mix, output = self.attention.values()
        assert isinstance(project, nn.ModuleDict)
        heads = [linear(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for linear in project.values()]
        mixed: Tensor = output(mix(*heads).transpose(1, 2).flatten(2))
        return mixed


class Bert(nn.Module):
    """The encoder of BERT with its pooler, without the heads of pre-training.

    There is no dropout, so that equal seeds give equal values on all devices.

    Source: Devlin et al., arXiv 1810.04805.

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
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(_Layer(width, n_heads) for _ in range(n_layers)))
        self.pooler = nn.Linear(width, width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the pooled first position, `[batch, width]`, of int64 `[batch, length]`, all in segment 0."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions) + self.segment(torch.zeros_like(tokens))
        pooled: Tensor = self.pooler(self.layers(self.norm(x))[:, 0])
        return pooled
