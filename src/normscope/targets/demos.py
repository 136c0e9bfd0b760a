"""``demo`` and ``demo:healthy``: models that ship with the package."""

from __future__ import annotations

from normscope import demo
from normscope.errors import BadTarget
from normscope.targets import Loaded


def load(target: str) -> Loaded:
    name = target.partition(":")[2] or demo.FAULTY
    if name not in demo.NAMES:
        raise BadTarget(f"there is no demo {name!r}; there are {', '.join(demo.NAMES)}")
    model, inputs, targets, optimizer = demo.load(name)
    return Loaded(
        model,
        inputs,
        targets,
        loss_fn=demo.loss,
        optimizer=optimizer,
        dataset_size=demo.TRAINING_SAMPLES,
    )
