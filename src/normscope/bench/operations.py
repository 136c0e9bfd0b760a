"""What is measured: operations, and the shapes, layouts and dtypes of their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from normscope.bench import machine, spelled_out, whitening
from normscope.errors import BadInput

CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels-last"
SIZES = SMALL, MIDDLE, LARGE = "small", "middle", "large"
DTYPES = ("float32", "bfloat16", "float16", "float64")
GROUPS = 32
STEPS = 2
"""of a spiking network, in the axis of samples"""

EPS_RMS, EPS = 1e-6, 1e-5
Shape = tuple[int, ...]

BEYOND = 1.25
"""times the last-level cache: the size of a large input"""
SHARE = 32
"""a large input takes at most this part of the free memory: eager RMS norm makes ten of it with backward"""


@dataclass(frozen=True)
class Tensors:
    """The inputs of one call. ``state`` are running mean and variance, ``gradients`` those of the outputs."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    bias: Tensor
    state: tuple[Tensor, Tensor]
    gradients: tuple[Tensor, ...]

    @property
    def features(self) -> tuple[int, ...]:
        return (self.x.shape[-1],)


@dataclass(frozen=True)
class Op:
    """``function`` of normscope.functional (or of ``spelled_out``) on ``arguments``, with parameters on ``axis``.

    ``inputs`` are what gets a gradient, ``sets`` counts statistic sets, ``passes`` go over the data: forward, and with
    backward.

    Forward reads and writes once, backward reads the gradient and the input and writes: 2 and 5. With a residual there
    are two inputs, two outputs and two gradients that arrive: 4 and 8.
    """

    name: str
    function: str
    arguments: Callable[[Tensors], tuple[Any, ...]]
    inputs: tuple[str, ...]
    axis: int
    sets: Callable[[Shape], int]
    small: tuple[Shape, ...]
    middle: tuple[Shape, ...]
    layouts: tuple[str, ...] = (CONTIGUOUS,)
    passes: tuple[int, int] = (2, 5)

    @property
    def eager(self) -> Callable[..., Any]:
        """The same in PyTorch alone."""
        own: dict[str, Callable[..., Any]] = {
            "add_rms_norm": add_rms_norm,
            "add_layer_norm": add_layer_norm,
            "masked_batch_norm": spelled_out.masked_batch_norm,
            "td_batch_norm": spelled_out.td_batch_norm,
            "batch_whitening": whitening.batch_whitening,
            "iter_norm": whitening.iter_norm,
        }
        found: Callable[..., Any] = own.get(self.function) or getattr(F, self.function)
        return found

    @property
    def ours(self) -> Callable[..., Any]:
        from normscope import functional

        own: dict[str, Callable[..., Any]] = {
            "masked_batch_norm": spelled_out.our_masked_batch_norm,
            "td_batch_norm": spelled_out.our_td_batch_norm,
            "batch_whitening": whitening.our_batch_whitening,
            "iter_norm": whitening.our_iter_norm,
        }
        found: Callable[..., Any] = own.get(self.function) or getattr(functional, self.function)
        return found


def add_rms_norm(
    x: Tensor, residual: Tensor, shape: Shape, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, shape, weight, eps), total


def add_layer_norm(
    x: Tensor, residual: Tensor, shape: Shape, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, shape, weight, bias), total


def _rows(shape: Shape) -> int:
    return math.prod(shape[:-1])


ROWS_SMALL: tuple[Shape, ...] = ((1, 768), (64, 768))
ROWS: tuple[Shape, ...] = ((8, 1024, 768), (2, 1024, 4096))
IMAGE_SMALL: Shape = (2, 64, 14, 14)
IMAGES: tuple[Shape, ...] = ((32, 64, 56, 56),)
BOTH = (CONTIGUOUS, CHANNELS_LAST)

_ALL = (
    Op(
        "layer_norm",
        "layer_norm",
        lambda t: (t.x, t.features, t.weight, t.bias, EPS),
        ("x", "weight", "bias"),
        -1,
        _rows,
        ROWS_SMALL,
        ROWS,
    ),
    Op(
        "rms_norm",
        "rms_norm",
        lambda t: (t.x, t.features, t.weight, EPS_RMS),
        ("x", "weight"),
        -1,
        _rows,
        ROWS_SMALL,
        ROWS,
    ),
    Op(
        "add_rms_norm",
        "add_rms_norm",
        lambda t: (t.x, t.residual, t.features, t.weight, EPS_RMS),
        ("x", "residual", "weight"),
        -1,
        _rows,
        ROWS_SMALL,
        ROWS,
        passes=(4, 8),
    ),
    Op(
        "add_layer_norm",
        "add_layer_norm",
        lambda t: (t.x, t.residual, t.features, t.weight, t.bias),
        ("x", "residual", "weight", "bias"),
        -1,
        _rows,
        ROWS_SMALL,
        ROWS,
        passes=(4, 8),
    ),
    Op(
        "batch_norm_train",
        "batch_norm",
        lambda t: (t.x, *t.state, t.weight, t.bias, True, 0.1, EPS),
        ("x", "weight", "bias"),
        1,
        lambda shape: shape[1],
        ((64, 768), IMAGE_SMALL),
        IMAGES,
        BOTH,
    ),
    Op(
        "batch_norm_eval",
        "batch_norm",
        lambda t: (t.x, *t.state, t.weight, t.bias, False, 0.1, EPS),
        ("x", "weight", "bias"),
        1,
        lambda shape: shape[1],
        ((1, 768), (64, 768), IMAGE_SMALL),
        IMAGES,
        BOTH,
    ),
    Op(
        "group_norm",
        "group_norm",
        lambda t: (t.x, GROUPS, t.weight, t.bias, EPS),
        ("x", "weight", "bias"),
        1,
        lambda shape: shape[0] * GROUPS,
        (IMAGE_SMALL,),
        IMAGES,
        BOTH,
    ),
    Op(
        "instance_norm",
        "instance_norm",
        lambda t: (t.x, None, None, t.weight, t.bias, True, 0.1, EPS),
        ("x", "weight", "bias"),
        1,
        lambda shape: shape[0] * shape[1],
        (IMAGE_SMALL,),
        IMAGES,
        BOTH,
    ),
    Op(
        "masked_batch_norm",
        "masked_batch_norm",
        lambda t: (t.x, *t.state, t.weight, t.bias, spelled_out.frames(t.x), EPS),
        ("x", "weight", "bias"),
        1,
        lambda shape: shape[1],
        (IMAGE_SMALL,),
        IMAGES,
    ),
    Op(
        "td_batch_norm",
        "td_batch_norm",
        lambda t: (t.x, *t.state, t.weight, t.bias, STEPS, EPS),
        ("x", "weight", "bias"),
        1,
        lambda shape: shape[1],
        (IMAGE_SMALL,),
        IMAGES,
    ),
)
_WHITENING = [
    Op(
        name,
        name,
        lambda t: (t.x, t.weight, t.bias, EPS),
        ("x", "weight", "bias"),
        1,
        lambda shape: shape[1] // whitening.TOGETHER,
        (IMAGE_SMALL,),
        IMAGES,
    )
    for name in ("batch_whitening", "iter_norm")
]
OPS = {op.name: op for op in (*_ALL, *_WHITENING)}


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    op: Op
    shape: Shape
    group: str
    layout: str
    dtype: str

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def bytes(self) -> int:
        """Of the input."""
        size: int = getattr(torch, self.dtype).itemsize
        return math.prod(self.shape) * size

    def __str__(self) -> str:
        return f"{self.op.name} {self.size} {self.layout} {self.dtype}"

    def tensors(self) -> Tensors:
        """Fresh inputs, the same every time."""
        dtype = getattr(torch, self.dtype)
        random = torch.Generator().manual_seed(0)
        last = self.layout == CHANNELS_LAST
        form = torch.channels_last if last else torch.contiguous_format

        def drawn(shape: Shape) -> Tensor:
            return torch.randn(shape, generator=random).to(dtype=dtype, memory_format=form)

        count = self.shape[self.op.axis]
        weight = 1 + 0.1 * torch.randn(count, generator=random)
        bias = 0.1 * torch.randn(count, generator=random)
        x = drawn(self.shape).requires_grad_()
        twice = "residual" in self.op.inputs  # then there are two outputs too
        return Tensors(
            x=x,
            residual=drawn(self.shape).requires_grad_() if twice else x,
            weight=weight.to(dtype).requires_grad_(),
            bias=bias.to(dtype).requires_grad_(),
            state=(torch.zeros(count, dtype=dtype), torch.ones(count, dtype=dtype)),
            gradients=tuple(drawn(self.shape) for _ in range(1 + twice)),
        )


def cases(
    ops: Iterable[str] = OPS,
    dtypes: Iterable[str] = DTYPES[:2],
    sizes: Iterable[str] = SIZES,
) -> list[Case]:
    """All lines for these operations and dtypes; ``sizes`` are small, middle, large, or shapes as 64x768.

    >>> [str(case) for case in cases(["rms_norm"], ["float32"], ["small"])]
    ['rms_norm 1x768 contiguous float32', 'rms_norm 64x768 contiguous float32']

    Raises:
        BadInput: an operation, dtype or size that is not known.
    """
    chosen = [_known("operation", name.replace("-", "_"), OPS) for name in ops]
    named = [_known("dtype", name, DTYPES) for name in dtypes]
    wanted = list(sizes)
    found = [case for op in chosen for case in _of(OPS[op], named)]
    possible = list(dict.fromkeys([*SIZES, *(c.size for c in found if c.group != LARGE)]))
    for size in wanted:
        _known("size", size, possible)
    return [case for case in found if case.group in wanted or case.size in wanted]


def _of(op: Op, dtypes: Iterable[str]) -> Iterator[Case]:
    for dtype in dtypes:
        groups = {SMALL: op.small, MIDDLE: op.middle, LARGE: (_large(op.middle[-1], dtype),)}
        for group, shapes in groups.items():
            for shape in shapes:
                for layout in op.layouts if len(shape) == 4 else (CONTIGUOUS,):
                    yield Case(op, shape, group, layout, dtype)


def _large(like: Shape, dtype: str) -> Shape:
    """Of this shape, but with so many leading entries that it does not fit the last-level cache."""
    wanted = min(BEYOND * machine.last_level_cache(), machine.memory()[1] / SHARE)
    rest = like[1:] if len(like) == 4 else like[-1:]
    entry = math.prod(rest) * getattr(torch, dtype).itemsize
    return (16 * math.ceil(wanted / entry / 16), *rest)


def _known(what: str, name: str, known: Iterable[str]) -> str:
    if name not in (known := list(known)):
        raise BadInput(f"there is no {what} {name!r} to measure; known: {', '.join(known)}")
    return name
