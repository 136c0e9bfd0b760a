"""RMS norm: every position by the root of its mean square over the last axes, without centering.

    torch      y = cast(weight * x / sqrt(mean(x^2) + eps))             eps: machine epsilon of the arithmetic
    llama      y = weight * cast(x / sqrt(mean(x^2) + eps))             eps: 1e-6
    t5         y = weight * cast(x / sqrt(mean(x^2) + eps))             eps: 1e-6
    gemma      y = cast((1 + weight) * x / sqrt(mean(x^2) + eps))       eps: 1e-6

The arithmetic is float32 (torch's also float64 for float64). cast goes to the input's dtype; for t5 to the weight's
where that is a half type, and nowhere else. Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4;
the conventions are those of transformers' LlamaRMSNorm, T5LayerNorm and GemmaRMSNorm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from normscope.errors import BadInput
from normscope.functional import normalize, rms_norm
from normscope.nn.arguments import last_sizes, positive_eps, sizes
from normscope.nn.masking import by_element, filled, is_packed, masked_leaf, normalize_masked, valid
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, is_scripting, method, refuse_script
from normscope.spec import Cast, NormSpec, families
from normscope.spec.axes import last_axes

CONVENTIONS = ("torch", "llama", "t5", "gemma")
HALF = (torch.float16, torch.bfloat16)


class RMSNorm(nn.RMSNorm):
    """RMS norm over the last axes: a ``torch.nn.RMSNorm``, with the conventions of well-known models by name.

    Arguments: torch's, normalized_shape, eps=None (the convention's own), elementwise_affine=True, device, dtype; and
    ``convention``, ``"torch"``, ``"llama"``, ``"t5"`` or ``"gemma"``: the order of casts, what the weight counts from
    (a gemma weight starts at 0), the default eps.
    Shapes: input (..., *normalized_shape), weight ``normalized_shape``. Input and output float16, bfloat16, float32
    or float64. Where input and weight differ in dtype, the output has the dtype that each convention gives it: the
    input's for torch and gemma, the wider of the two for llama, the weight's for t5.

    Raises BadInput (a ValueError) where a size is below 1, eps is 0 or less, the convention is none of these, or the
    input does not end in ``normalized_shape``.

    >>> import torch
    >>> RMSNorm(2, eps=1e-6)(torch.tensor([[3.0, 4.0]])).round(decimals=4)
    tensor([[0.8485, 1.1314]], grad_fn=...)
    >>> norm = RMSNorm(2, convention="gemma")
    >>> norm, norm.weight.tolist()
    (RMSNorm((2,), eps=1e-06, elementwise_affine=True, convention='gemma'), [0.0, 0.0])
    >>> norm.spec.weight_offset, norm.spec.cast
    (1.0, Cast(compute='float32', weight='before'))
    """

    __jit_unused_properties__ = ("spec",)
    _scripted = method("_scripted", nn.RMSNorm.forward)
    convention = "torch"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        convention: str = "torch",
    ) -> None:
        if convention not in CONVENTIONS:
            raise BadInput(
                f"RMSNorm knows the conventions {', '.join(CONVENTIONS)}; got {convention!r}. "
                "Mistral, Qwen and most others are llama."
            )
        fix = "Give the sizes of the input's last axes, such as x.shape[-1]."
        shape = sizes("RMSNorm", "normalized_shape", normalized_shape, fix)
        if eps is None and convention != "torch":
            eps = 1e-6
        super().__init__(
            shape, None if eps is None else positive_eps("RMSNorm", eps), elementwise_affine, device, dtype
        )
        self.convention = convention
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, or 0 where it counts from 1."""
        if self.weight is not None:
            (init.zeros_ if self.convention == "gemma" else init.ones_)(self.weight)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, fill: str = "zero"
    ) -> Tensor:
        """The mean square of each position, in training as in evaluation. Masks: see `normscope.nn.masking`; lengths
        run along axis 1.
        """
        if is_scripting():
            return self._scripted(x)
        if isinstance(x, Proxy):
            return masked_leaf(self, x, mask, lengths, fill)
        if is_packed(self, x, mask, lengths, fill):
            return by_element(x, self.forward)
        last_sizes("RMSNorm", x, self.normalized_shape)
        weight: Tensor | None = self.weight
        if mask is not None or lengths is not None:
            axes = 2 + len(self.normalized_shape)
            if weight is None or weight.dtype == x.dtype or self.convention in ("torch", "gemma"):
                return normalize_masked(self, x, mask, lengths, fill, time=1, axes=axes)
            counts = valid("RMSNorm", x, mask, lengths, time=1, axes=axes)
            return filled(weight * self._unit(x, weight.dtype, counts), self.spec, None, counts, fill)
        if self.convention == "torch":
            return rms_norm(x, self.normalized_shape, weight, self.eps)
        if weight is None or weight.dtype == x.dtype or self.convention == "gemma":
            return normalize(x, self.spec, weight)
        return weight * self._unit(x, weight.dtype)

    def __prepare_scriptable__(self) -> RMSNorm:
        if self.convention != "torch":
            refuse_script(self)
        return self

    def _unit(self, x: Tensor, weight_dtype: torch.dtype, mask: Tensor | None = None) -> Tensor:
        """Without the weight, in the dtype that llama and t5 multiply it with where it is not the input's."""
        plain = _spec(len(self.normalized_shape), self.eps, False, self.convention)
        if self.convention == "llama":
            return normalize(x, plain, mask=mask)
        y = normalize(x.float(), plain, mask=mask)
        return y.to(weight_dtype) if weight_dtype in HALF else y

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(
            len(self.normalized_shape),
            None if self.eps is None else float(self.eps),
            self.weight is not None,
            self.convention,
        )

    def extra_repr(self) -> str:
        """As torch's, with another convention named after it."""
        convention = "" if self.convention == "torch" else f", convention={self.convention!r}"
        return super().extra_repr() + convention


@remembered
def _spec(axes: int, eps: float | None, weight: bool, convention: str) -> NormSpec:
    if convention == "torch":
        cast = Cast()
    else:
        cast = Cast(compute="float32", weight="before" if convention == "gemma" else "after")
    offset = 1.0 if convention == "gemma" and weight else 0.0
    return families.rms_norm(last_axes(axes), eps=eps, weight=weight, weight_offset=offset, cast=cast)
