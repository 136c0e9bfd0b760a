"""Whether an answer holds at other sizes of the axes too, such as another number of samples."""

from __future__ import annotations

from normscope.identify import fresh
from normscope.identify.box import Array
from normscope.identify.partition import Partition
from normscope.identify.probing import Prober
from normscope.identify.second_size import with_size
from normscope.spec import NormSpec

LEAST = 3
"""elements of an axis that can be one shorter: one of one element shows nothing"""


def say_other_sizes(
    f: Prober,
    partition: Partition,
    spec: NormSpec,
    weight: Array | None,
    bias: Array | None,
    near_eps: float | None,
) -> None:
    """Compare once more with one element less along every kept axis whose size is free; note where it fails.

    An eps of 1e-3 over the number of samples is one number at each shape, and another function at the next. Less, as
    compiled code that does not check its sizes would read behind the end of its weights for more.
    """
    shape = partition.shape
    for dim, factors in enumerate(partition.dims):
        if len(factors) > 1 or not factors[0].kept or shape[dim] < LEAST:
            continue
        shorter = with_size(shape, dim, shape[dim] - 1)
        if f.takes(shorter):
            shape = shorter
    if shape == partition.shape:
        return
    try:
        verdict = fresh.verify(f, shape, spec, weight, bias, near_eps, fresh.FEW)
    except ValueError:  # its parameters are bound to the size
        return
    if verdict.holds:
        f.conclude("it is the same at another shape", "the reference there", shape=shape, error=verdict.error)
    else:
        f.notes.append(
            f"at the shape {shape} it is another function, off by {verdict.error:.2g} of the largest output: something "
            f"in it depends on the size. What is told here holds at {partition.shape}"
        )
