"""The draft in training: decoder layers as modules with gradients, the equal of `dustin_runtime.models.decoder`.

The target is run by the same class without gradients, so that what the draft learns from is what it is compared with;
a test holds both equal to the runtime's decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dustin_runtime.errors import ConfigError
from dustin_runtime.models import ops
from dustin_runtime.models.decoder import Decoder, LayerWeights
from dustin_runtime.models.rope import Rope
from dustin_runtime.models.shape import ModelShape


class Layer(nn.Module):
    """One decoder layer; parameters are named and laid out as in `LayerWeights`, in fp32."""

    def __init__(self, shape: ModelShape, weights: LayerWeights, ffn: int | None = None) -> None:
        """Copy a layer, with the strongest `ffn` channels of its MLP if that is given."""
        super().__init__()
        self.query_heads, self.kv_heads, self.head_size = shape.query_heads, shape.kv_heads, shape.head_size
        self.eps = shape.norm_eps
        for name in ("attention_norm", "qkv", "output", "mlp_norm", "gate_up", "down"):
            self.register_parameter(name, nn.Parameter(getattr(weights, name).detach().float().clone()))
        if ffn is not None:
            kept = strongest(self.gate_up.data, self.down.data, ffn)
            self.gate_up = nn.Parameter(self.gate_up.data[torch.cat((kept, kept + shape.ffn))])
            self.down = nn.Parameter(self.down.data[:, kept].contiguous())

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, tokens, hidden] fp32 at positions 0, 1, ...; cos, sin [1, tokens, head_size / 2] fp32."""
        batch, tokens, _ = x.shape
        normed = ops.rms_norm(x, self.attention_norm, self.eps)
        heads = F.linear(normed, self.qkv).view(batch, tokens, -1, self.head_size)
        q, k, v = heads.split((self.query_heads, self.kv_heads, self.kv_heads), dim=2)
        q, k = ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)
        # Keys and values are repeated for their query heads: every fused kernel takes equal numbers of heads, and one
        # that does not would fall back to attention maps of tokens x tokens.
        group = self.query_heads // self.kv_heads
        q, k, v = q.transpose(1, 2), *(y.transpose(1, 2).repeat_interleave(group, dim=1) for y in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(batch, tokens, -1), self.output)
        gate, up = F.linear(ops.rms_norm(x, self.mlp_norm, self.eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


def strongest(gate_up: Tensor, down: Tensor, count: int) -> Tensor:
    """The channels of a gated MLP whose weights are largest: [count] ascending indices.

    A channel's strength is the product of the norms of its rows of gate and up and of its column of down.

    Args:
        gate_up: [2 ffn, hidden]; down: [hidden, ffn].
    """
    gate, up = gate_up.chunk(2)
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept: Tensor = strength.topk(count).indices.sort().values
    return kept


class Stack(nn.Module):
    """Layers and a final norm between an embedding and a head that are another model's.

    Attributes:
        embedding, head: [vocab, hidden] fp32, frozen and shared; not among the parameters.
    """

    def __init__(
        self,
        decoder: Decoder,
        layers: Sequence[int],
        length: int,
        *,
        ffn: int | None = None,
        recompute: bool = False,
    ) -> None:
        """Copy layers of a decoder.

        Args:
            layers: which, in order; one may occur twice.
            length: positions that are trained on at most.
            ffn: channels of every MLP that are kept; None for all.
            recompute: whether the backward pass computes a layer's activations anew instead of keeping them.

        Raises:
            ConfigError: the decoder has no such layer, or parts that are not trained here.
        """
        super().__init__()
        shape = decoder.shape
        if shape.qkv_bias or shape.qk_norm:
            raise ConfigError(f"family {shape.family}: biases and norms of queries and keys are not trained here")
        if wrong := [index for index in layers if not 0 <= index < shape.layers]:
            raise ConfigError(f"layer {wrong[0]}: the target has layers 0 to {shape.layers - 1}")
        if ffn is not None and not 0 < ffn <= shape.ffn:
            raise ConfigError(f"ffn {ffn}: the target's MLPs have {shape.ffn} channels")
        self.shape = shape.model_copy(update={"layers": len(layers), "ffn": ffn or shape.ffn})
        self.recompute = recompute
        self.layers = nn.ModuleList(Layer(shape, decoder.weights.layers[index], ffn) for index in layers)
        self.norm = nn.Parameter(decoder.weights.norm.detach().float().clone())
        self.embedding = decoder.weights.embedding.detach().float()
        self.head = decoder.weights.head.detach().float()
        rope = Rope(shape, length, decoder.device)
        self.cos, self.sin = rope.cos.unsqueeze(0), rope.sin.unsqueeze(0)

    def each_layer(self) -> Iterator[Layer]:
        """The layers in order."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    def forward(self, ids: Tensor) -> Tensor:
        """ids [batch, tokens] int64 -> [batch, tokens, hidden] normalised final states, fp32."""
        tokens = ids.shape[1]
        x = F.embedding(ids, self.embedding)
        cos, sin = self.cos[:, :tokens], self.sin[:, :tokens]
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return ops.rms_norm(x, self.norm, self.shape.norm_eps)


def draft_and_target(
    decoder: Decoder, layers: Sequence[int], length: int, *, ffn: int | None = None, recompute: bool = False
) -> tuple[Stack, Stack]:
    """The draft to be trained and the frozen target, which share embedding and head."""
    target = Stack(decoder, range(decoder.shape.layers), length).requires_grad_(False).eval()
    draft = Stack(decoder, layers, length, ffn=ffn, recompute=recompute)
    draft.embedding, draft.head = target.embedding, target.head
    return draft, target
