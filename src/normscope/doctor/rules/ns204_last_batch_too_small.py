"""last-batch-too-small: the training set leaves a last batch that batch statistics cannot be taken of.

## What it does
Divides the number of training samples by the size of the batch that the check was given. Where a remainder is left,
the statistic sets of that last batch are counted at every site that normalizes by the batch in training, from the
shapes seen in a forward: samples times places.

- one element a set: a warning. PyTorch raises; a norm written by hand outputs its bias;
- two elements: a warning. Every pair comes out as +1 and -1 whatever it was, and the running variance takes the
  estimate in;
- three or four elements: info. The standard deviation is known to 50 % and 41 %;
- a ghost batch norm whose virtual batches do not divide it, with `remainder="error"`: a warning. It raises.

The batch of the check is taken for a training batch. Whether the loader drops the last batch (`drop_last=True`)
cannot be seen from here.

## Why it matters
Training runs for a whole epoch and fails at its last step; or it does not fail, and once an epoch the weights take a
step on noise and the running statistics take in a variance from next to nothing.

## Known problems
A loader that drops, fills up or spreads the remainder makes this harmless: ignore the rule there. Of several
processes each has its own remainder, which this does not compute.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
# 1000 = 37 * 27 + 1
report = normscope.check(model, torch.randn(27, 8), dataset_size=1000)
print(report)
```

## Fix
`DataLoader(..., drop_last=True)`, or another batch size. With very small batches use a norm that does not need one.

## References
- The documentation of `torch.utils.data.DataLoader`, on `drop_last`.
- The standard error of a standard deviation, 1 / sqrt(2 (n - 1)) for Gaussian values: any text on statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, percent, plural
from normscope.spec.pattern import PatternError

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

LARGEST = 4
UNEVEN = 0


@rule("NS204", "last-batch-too-small", kinds="D", needs=("data",))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    coupled = [site for site in subject.known() if _by_batch_in_training(site)]
    if not coupled:
        return
    if subject.dataset_size is None:
        yield NotRun("NS204", "needs dataset_size: the number of training samples")
        return
    last = subject.dataset_size % subject.batch_size
    if last == 0:
        return
    sizes = [(site, min(_set_sizes(subject, site, last), default=LARGEST + 1)) for site in coupled]
    small = sorted(((size, site) for site, size in sizes if size <= LARGEST), key=lambda item: item[0])
    yield from fold(_finding(subject, site, size, last) for size, site in small)


def _by_batch_in_training(site: Site) -> bool:
    assert site.spec is not None
    return site.mode_train == "batch" and site.spec.properties().couples_samples


def _set_sizes(subject: Subject, site: Site, last: int) -> Iterator[int]:
    """Elements per statistic set of each call, if the batch had ``last`` samples."""
    for call in site.calls:
        spec = call.spec or site.spec
        assert spec is not None
        axis = spec.bind(call.shape).sample_dim
        if axis is None or call.shape[axis] % subject.batch_size:
            continue  # its rows are not samples times something
        shape = list(call.shape)
        shape[axis] = shape[axis] // subject.batch_size * last
        try:
            yield spec.bind(tuple(shape)).set_size
        except PatternError:  # no multiple of its virtual batches
            yield UNEVEN


def _finding(subject: Subject, site: Site, size: int, last: int) -> Finding:
    last_batch = plural(last, "sample")
    if size == UNEVEN:
        what = f"{last_batch}, which do not fall into its virtual batches: the layer raises"
    elif size == 1:
        what = "its output is the bias, and PyTorch's own layers raise"
    elif size == 2:
        what = "every pair comes out as +1 and -1"
    else:
        what = f"their scale is known to {percent((1 / (2 * (size - 1))) ** 0.5)}"
    if size != UNEVEN:
        what = f"{last_batch}, whose statistic sets here have {plural(size, 'element')}: {what}"
    return Finding(
        code="NS204",
        site=site.name,
        severity="warning" if size <= 2 else "info",
        message=f"{subject.dataset_size} training samples in batches of {subject.batch_size} leave a last batch of "
        f"{what} (unless the loader drops that batch, which cannot be seen).",
        evidence={
            "dataset_size": subject.dataset_size,
            "batch_size": subject.batch_size,
            "last_batch": last,
            "set_size": size,
        },
        fix="DataLoader(..., drop_last=True), or another batch size",
        mode="train",
    )
