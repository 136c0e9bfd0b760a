"""Weight standardization: a weight whose every output has mean 0 and deviation 1 over its inputs, in each forward anew.

    unbiased:  w' = (w - mean) / (sqrt(sum((w - mean)^2) / (n - 1)) + eps)      eps=1e-5    Qiao et al. 2019
    biased:    w' = (w - mean) / sqrt(var + eps)                                eps=1e-10   Kolesnikov et al. 2020 (BiT)
    scaled:    w' = weight * gamma * (w - mean) / sqrt(max(n var, eps))         eps=1e-4    Brock et al. 2021 (NFNet)

n is the number of inputs of an output, its fan-in: I times the size of the kernel. The scaled form keeps the variance
of what goes through, and has a learned weight for each output. https://arxiv.org/abs/1903.10520 (the form is that of
its listing), https://arxiv.org/abs/1912.11370, https://arxiv.org/abs/2102.06171.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.nn.arguments import sizes
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable, leaf
from normscope.nn.whitened_sets import choice, eps_or_zero
from normscope.spec import NormSpec, families

EPS = {"unbiased": 1e-5, "biased": 1e-10, "scaled": 1e-4}


class WeightStandardization(Unscriptable):
    """Weight standardization of weights (O, I, ...): a parametrization, and a module that can be called on its own.

    Arguments: shape, that of the weight; form="unbiased", see the head of this file; eps=None, that of the form;
    device, dtype; and by name
        gamma=1.0: a fixed factor of the scaled form, 1.7139588594436646 before a ReLU.
        affine=None: a learned weight for each output, by default in the scaled form only, which can be without.
    Shapes: weight (O,). Input and output float16, bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where an output has one input or none, eps is negative, or the weight has another
    shape.

    >>> import torch
    >>> weight = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 9.0]])
    >>> WeightStandardization((2, 3), "biased")(weight)
    tensor([[-1.2247,  0.0000,  1.2247],
            [-0.7071, -0.7071,  1.4142]])
    """

    weight: Tensor | None

    def __init__(
        self,
        shape: Sequence[int],
        form: str = "unbiased",
        eps: float | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        gamma: float = 1.0,
        affine: bool | None = None,
    ) -> None:
        super().__init__()
        name = "WeightStandardization"
        self.shape = sizes(name, "shape", shape, "Give the shape of the weight.")
        if len(self.shape) < 2 or prod(self.shape[1:]) < 2:
            raise BadInput(
                f"{name} needs two inputs or more for each output, or all it gives is 0; got a weight of shape "
                f"{self.shape}. Leave such a weight as it is."
            )
        self.form = choice(name, "form", form, tuple(EPS))
        self.eps = eps_or_zero(name, EPS[self.form] if eps is None else eps)
        scaled = self.form == "scaled"
        if not scaled and (gamma != 1.0 or affine):
            raise BadInput(
                f"{name} has a gamma and a learned weight in the scaled form; got gamma={gamma!r} and affine={affine!r}"
                f" in the {self.form} form. Take form='scaled', or leave them out."
            )
        self.gamma = float(gamma)
        learned = None
        if scaled and affine is not False:
            learned = nn.Parameter(torch.ones(self.shape[0], device=device, dtype=dtype))
        self.register_parameter("weight", learned)

    def reset_parameters(self) -> None:
        """Weight 1, where there is one."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight, standardized."""
        if isinstance(weight, Proxy):
            return leaf(self, weight)
        if tuple(weight.shape) != self.shape:
            raise BadInput(
                f"WeightStandardization was made for a weight of shape {self.shape}; got one of shape "
                f"{tuple(weight.shape)}. Make it for that one."
            )
        return normalize(weight, self.spec, self.weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is assigned is the weight that is standardized from then on."""
        return weight

    @property
    def spec(self) -> NormSpec:
        """What the parametrization computes, from its attributes as they are now."""
        return _spec(self.form, float(self.eps), float(self.gamma), self.weight is not None)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        scaled = f", gamma={self.gamma}, affine={self.weight is not None}" if self.form == "scaled" else ""
        return f"{self.shape}, {self.form!r}, eps={self.eps}{scaled}"


@remembered
def _spec(form: str, eps: float, gamma: float, weight: bool) -> NormSpec:
    if form == "scaled":
        return families.scaled_weight_standardization(gamma=gamma, eps=eps, weight=weight)
    if form == "biased":
        return families.biased_weight_standardization(eps=eps)
    return families.weight_standardization(eps=eps)


def weight_standardization(
    module: nn.Module,
    name: str = "weight",
    form: str = "unbiased",
    *,
    eps: float | None = None,
    gamma: float = 1.0,
    affine: bool | None = None,
) -> nn.Module:
    """Standardize a weight of ``module`` in each forward; returns the module.

    Arguments: ``name`` of the parameter, (O, I, ...), and the arguments of `WeightStandardization`. It is a
    parametrization of ``torch.nn.utils.parametrize``: what is trained is ``parametrizations.weight.original``, the
    parameter as it was; ``module.weight`` is computed of it wherever it is read (once under ``parametrize.cached()``).

    Raises BadInput where there is no such parameter, its outputs are not on axis 0 (a transposed convolution), or as
    `WeightStandardization`.

    >>> conv = weight_standardization(nn.Conv2d(3, 8, 3))
    >>> conv.weight.mean((1, 2, 3)).abs().max() < 1e-6, conv.weight.std((1, 2, 3)).mean().round(decimals=3).item()
    (tensor(True), 1.0)
    >>> print(conv.parametrizations.weight[0].spec)
    o i ... -> o; centered; std, unbiased; eps 1e-05 outside the root; no weight; no bias
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise BadInput(
            f"weight_standardization takes the name of a parameter of {type(module).__name__}; got {name!r}. Its "
            f"parameters are {', '.join(own for own, _ in module.named_parameters(recurse=False)) or 'none'}."
        )
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        raise BadInput(
            f"weight_standardization takes a weight whose outputs are on axis 0; got {type(module).__name__}, which "
            "has its inputs there. Standardize an ordinary convolution."
        )
    made = WeightStandardization(
        weight.shape, form, eps, weight.device, weight.dtype, gamma=gamma, affine=affine
    )
    parametrize.register_parametrization(module, name, made)
    return module


def remove_weight_standardization(module: nn.Module, name: str = "weight") -> nn.Module:
    """Make the standardized weight a plain parameter, for deployment; returns the module, whose outputs stay.

    Raises BadInput where the weight is not standardized, or has other parametrizations too: torch removes all at once.

    >>> conv = remove_weight_standardization(weight_standardization(nn.Conv2d(3, 8, 3)))
    >>> type(conv).__name__, list(conv.state_dict())
    ('Conv2d', ['bias', 'weight'])
    """
    there: list[nn.Module] = []
    if parametrize.is_parametrized(module, name):
        there = list(module.parametrizations[name])  # type: ignore[index]
    if [type(one) for one in there] != [WeightStandardization]:
        found = ", ".join(type(one).__name__ for one in there) or "none"
        raise BadInput(
            f"remove_weight_standardization takes a parameter with that parametrization alone; {name!r} of "
            f"{type(module).__name__} has {found}. torch.nn.utils.parametrize.remove_parametrizations removes them all."
        )
    parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return module
