"""Adaptive layer norm: layer norm whose gain and bias are computed for every sample, from what it is conditioned on.

    y = (offset + scale) * (x - mean) / sqrt(var + eps) + shift

Mean and biased variance of each position run over its features. Peebles and Xie 2023 (DiT),
https://arxiv.org/abs/2212.09748, section 3.2, with offset 1, eps 1e-6 and a linear layer that starts at zero
(adaLN-Zero). Their code's layer gives first the shifts, then the scales, and reads SiLU of the condition, which is left
to the caller here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.nn.arguments import last_sizes, positive_eps, sizes
from normscope.nn.modulation import Modulated
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Unscriptable
from normscope.spec import NormSpec, families


class AdaptiveLayerNorm(Unscriptable, Modulated):
    """Layer norm over the last axis, with scale and shift of every sample.

    Arguments: num_features, the size D of the last axis; and by name
        condition_features: K, where ``modulation`` makes scale and shift of a condition by a linear layer.
        classes: their number, where it makes them of a class, by a table.
        eps=1e-6; offset=1.0, what the scale counts from; zero=True: ``modulation`` starts so that the layer is layer
        norm alone; per_position=False: a scale and shift for every position rather than for every sample; device,
        dtype.
    Called ``layer(x, condition)`` with either of the first two, and else ``layer(x, scale=scale, shift=shift)``. With
    ``mask=`` or ``lengths=`` (along axis 1) the output is 0 where an element does not count.
    Shapes: x (B, ..., D); condition (B, K) or, of classes, (B,); scale and shift (B, D). With ``per_position`` these
    three have the positions of x between their axes. Input and output float16, bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where a size is below 1, eps is 0 or less, x has another last axis, or what came with
    x is not what the layer was made for.

    >>> import torch
    >>> norm = AdaptiveLayerNorm(4)
    >>> x, scale = torch.tensor([[1.0, 1.0, 3.0, 3.0]]), torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    >>> norm(x, scale=scale, shift=torch.zeros(1, 4)).round(decimals=3).tolist()
    [[-1.0, -2.0, 1.0, 2.0]]
    >>> AdaptiveLayerNorm(4, condition_features=8)(torch.randn(2, 5, 4), torch.randn(2, 8)).shape
    torch.Size([2, 5, 4])
    >>> norm.spec.weight, norm.spec.weight_offset, norm.spec.source
    ('b d', 1.0, 'input')
    """

    _features, _time = -1, 1

    def __init__(
        self,
        num_features: int,
        *,
        condition_features: int | None = None,
        classes: int | None = None,
        eps: float = 1e-6,
        offset: float = 1.0,
        zero: bool = True,
        per_position: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        (self.num_features,) = sizes(name, "num_features", num_features, "Give the size of the last axis.")
        self.eps = positive_eps(name, eps)
        self.per_position = per_position
        self._set_modulation(self.num_features, condition_features, classes, zero, offset, device, dtype)

    def reset_parameters(self) -> None:
        """``modulation`` as new."""
        self._reset_modulation()

    def _check_shape(self, x: Tensor) -> None:
        last_sizes(type(self).__name__, x, (self.num_features,))
        if x.dim() < 2:
            raise BadInput(
                f"{type(self).__name__} takes samples on axis 0 and features on the last; got an input of shape "
                f"{tuple(x.shape)}. For one sample use x.unsqueeze(0)."
            )

    def _shapes(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (tuple(x.shape), tuple(x.shape)) if self.per_position else super()._shapes(x)

    def _norm(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return normalize(x, _bare(self.eps), mask=mask)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(float(self.eps), self.offset, self.per_position)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        said = [str(self.num_features), f"eps={self.eps}", self._said_modulation()]
        return ", ".join([text for text in said if text] + ["per_position=True"] * self.per_position)


@remembered
def _bare(eps: float) -> NormSpec:
    return families.layer_norm(eps=eps, weight=False, bias=False)


@remembered
def _spec(eps: float, offset: float, per_position: bool) -> NormSpec:
    on = "b ... d" if per_position else "b d"
    return NormSpec("b ... d -> b ...", weight=on, bias=on, source="input", weight_offset=offset, eps=eps)
