"""Adaptive instance norm (AdaIN): every channel of the content takes mean and deviation of the style's.

    y = deviation(style) * (x - mean(x)) / sqrt(var(x) + eps) + mean(style),   deviation = sqrt(var(style) + eps)

Mean and variance of each channel of each sample run over its positions. The paper's variance is biased
(``correction=0``); code that calls torch's ``var`` or ``std`` has the unbiased one (``correction=1``). Huang and
Belongie 2017, https://arxiv.org/abs/1703.06868, equation 8. Where gain and bias are made of a vector, as in StyleGAN,
see `AdaptiveGroupNorm`.
"""

from __future__ import annotations

from torch import Tensor

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.kernels.composite import Moments
from normscope.kernels.elementary import HALF, Elementary
from normscope.nn.arguments import positive_eps
from normscope.nn.masking import Lengths, not_packed, valid
from normscope.nn.modulation import modulated, modulated_leaf
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.spec import NormSpec, families


class AdaptiveInstanceNorm(Unscriptable):
    """Instance norm with the mean and deviation of a second input; no parameters.

    Arguments, by name: eps=1e-5; correction=0, or 1 for unbiased variances.
    Called ``layer(x, style)``. With ``mask=`` or ``lengths=`` (along the last axis) of x, and ``style_mask=``,
    statistics are over the elements that count, and the output is 0 where one of x does not.
    Shapes: x (N, C, ...) and style (N, C, ...), each with one position axis or more, of any sizes. Input and output
    float16, bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where eps is 0 or less, correction is neither 0 nor 1, or x and style have not the
    same samples and channels.

    >>> import torch
    >>> x, style = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[10.0, 10.0, 14.0, 14.0]]])
    >>> AdaptiveInstanceNorm()(x, style).round(decimals=3)
    tensor([[[10., 14.]]])
    """

    def __init__(self, *, eps: float = 1e-5, correction: int = 0) -> None:
        super().__init__()
        self.eps = positive_eps("AdaptiveInstanceNorm", eps)
        if correction not in (0, 1):
            raise BadInput(
                f"AdaptiveInstanceNorm divides squares by M - correction, which is 0 or 1; got {correction!r}. The "
                "paper's is 0, that of torch.var 1."
            )
        self.correction = int(correction)

    def forward(
        self,
        input: Tensor,
        style: Tensor,
        *,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        fill: str = "zero",
        style_mask: Tensor | None = None,
    ) -> Tensor:
        """The statistics of each sample, in training as in evaluation. Masks: see `normscope.nn.masking`."""
        if isinstance(input, Proxy):
            return modulated_leaf(
                self, input, fill, style=style, mask=mask, lengths=lengths, style_mask=style_mask
            )
        not_packed(self, input, fill)
        if min(input.dim(), style.dim()) < 3 or input.shape[:2] != style.shape[:2]:
            raise BadInput(
                "AdaptiveInstanceNorm takes x and style (N, C, ...) of the same samples and channels, each with one "
                f"position axis or more; got shapes {tuple(input.shape)} and {tuple(style.shape)}. For one sample use "
                "x.unsqueeze(0); one style for all samples is style.expand(len(x), ...)."
            )
        counts = None
        if mask is not None or lengths is not None:
            counts = valid("AdaptiveInstanceNorm", input, mask, lengths)
        bare = _bare(self.eps, self.correction)
        deviation, mean = self._style(style, bare, style_mask)
        beside = (*input.shape[:2], *[1] * (input.dim() - 2))
        return modulated(
            input,
            lambda x: normalize(x, bare, mask=counts),
            deviation.reshape(beside),
            mean.reshape(beside),
            0.0,
            counts,
            fill,
        )

    def _style(self, style: Tensor, bare: NormSpec, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if mask is not None:
            mask = valid("AdaptiveInstanceNorm", style, mask, None)
        view = Elementary.of(style.float() if style.dtype in HALF else style, bare, mask)
        moments = Moments.of(view)
        return (moments.variance(view, self.correction) + self.eps).sqrt(), moments.mean

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(float(self.eps), self.correction)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"eps={self.eps}" + (", correction=1" if self.correction else "")


@remembered
def _bare(eps: float, correction: int) -> NormSpec:
    return families.instance_norm(eps=eps).replace(correction=correction)


@remembered
def _spec(eps: float, correction: int) -> NormSpec:
    return families.instance_norm(eps=eps).replace(
        correction=correction, weight="b c", bias="b c", source="input"
    )
