"""Where the cells run: this process, processes beside it, or a cluster, all through joblib."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from typing import Any, Literal, get_args

from normscope.errors import BadInput, MissingExtra

Backend = Literal["loky", "sequential", "dask", "ray"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def each(
    call: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    backend: Backend,
    workers: int | None,
    scheduler: str | None,
) -> Iterator[Any]:
    """``call(*job)`` of every job, as each is finished.

    Raises BadInput for a cluster without an address, MissingExtra where its package is not installed.
    """
    if workers is not None and workers < 1:
        raise BadInput(f"workers must be 1 or more, got {workers}")
    if backend in ("dask", "ray") and scheduler is None:
        raise BadInput(
            f"the backend {backend} needs the address of a running cluster: pass scheduler (--scheduler)"
        )
    if backend not in ("dask", "ray") and scheduler is not None:
        raise BadInput(
            f"scheduler is the address of a cluster, and the backend {backend} has none: pass backend"
        )
    if not jobs:
        return
    if backend == "sequential":
        yield from (call(*job) for job in jobs)
        return
    import joblib

    with ExitStack() as stack:
        n_jobs = workers or -1
        if backend == "dask":
            stack.enter_context(_dask(scheduler))
            # The cluster has as many workers as it has.
            stack.enter_context(joblib.parallel_config("dask"))
        elif backend == "ray":
            stack.enter_context(_ray(scheduler))
            stack.enter_context(joblib.parallel_config("ray", n_jobs=n_jobs))
        else:
            stack.enter_context(joblib.parallel_config("loky", n_jobs=n_jobs))
            call = partial(_beside, call, os.getpid())
        tasks = [joblib.delayed(call)(*job) for job in jobs]
        # One at a time, so that a finished cell never waits for others to be written down.
        if backend != "ray":
            yield from joblib.Parallel(batch_size=1, return_as="generator_unordered")(tasks)
            return
        with joblib.Parallel(batch_size=1) as parallel:  # ray's returns lists alone: a round of workers each
            step = parallel._effective_n_jobs()
            for start in range(0, len(tasks), step):
                yield from parallel(tasks[start : start + step])


def _beside(call: Callable[..., Any], parent: int, *job: Any) -> Any:
    """In a process that ends when the run is killed: nobody would take its result."""
    if os.getpid() != parent:
        _end_with(parent)
    return call(*job)


@cache
def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _dask(scheduler: str | None) -> AbstractContextManager[Any]:
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtra("distributed", "studies-dask", "the backend dask") from None
    client: AbstractContextManager[Any] = Client(scheduler, set_as_default=True)  # type: ignore[no-untyped-call]
    return client


def _ray(scheduler: str | None) -> AbstractContextManager[Any]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise BadInput("the backend ray needs ray, which is not installed: pip install ray") from None
    register_ray()
    context: AbstractContextManager[Any] = ray.init(address=scheduler)
    return context
