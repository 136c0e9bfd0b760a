"""Copy-on-write of tensor memory: a storage is cloned once, before the first operation that writes to it.

Version counters cannot tell what a run wrote: they stay put when batch norm writes its running statistics and when
something writes through ``.data``. The dispatcher sees both.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.identify.memory import strided_parts

WRITTEN_UNANNOTATED = frozenset({"running_mean", "running_var", "dropout_state", "sobolstate"})
"""arguments that kernels write although their schema does not say so (native, cudnn and miopen batch norm)"""

_RESIZING = ("resize_", "resize_as_", "set_")

_ESCAPES = frozenset({torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__})
"""methods that hand out the tensor's memory: what is written through it later passes no dispatcher"""

_RAW_POINTERS = frozenset({torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage})

Key = tuple[torch.device, int]


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor: several storages for sparse tensors and wrapper subclasses (DTensor).

    Raises ``NotImplementedError`` or ``RuntimeError`` where torch gives no access to it.
    """
    for part in strided_parts(tensor):
        yield part.untyped_storage()


class Vault:
    """Storages under protection, the clones made of them, and the way back.

    A storage is known by its address, so tied weights and views are one. It is put back by copying into the same
    memory: addresses captured elsewhere (CUDA graphs, NumPy views) stay true. (A storage that the model resizes is
    moved by torch itself: it gets its size and bytes back, not its address.)
    """

    def __init__(self) -> None:
        self._held: dict[Key, tuple[torch.UntypedStorage, int, str]] = {}
        self._clones: dict[Key, torch.UntypedStorage] = {}
        self._checksums: dict[Key, int] = {}

    def hold(self, tensor: torch.Tensor, name: str = "") -> bool:
        """Protect the memory of ``tensor``; False where torch gives no access to it."""
        try:
            for storage in storages_of(tensor):
                # an empty storage has no address of its own, and nothing to lose
                if storage.nbytes():
                    self._held.setdefault(_key(storage), (storage, storage.nbytes(), name))
        except (NotImplementedError, RuntimeError):
            return False
        return True

    def save(self, tensor: torch.Tensor) -> None:
        """Clone the memory of ``tensor`` if it is protected and not cloned yet."""
        with torch._C.DisableTorchFunction():
            try:
                keys = [_key(storage) for storage in storages_of(tensor)]
            except (NotImplementedError, RuntimeError):
                return
            for key in keys:
                if key in self._held and key not in self._clones:
                    self._clones[key] = self._held[key][0].clone()  # type: ignore[no-untyped-call]

    def written(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lives in protected memory that may have been written."""
        try:
            return any(_key(storage) in self._clones for storage in storages_of(tensor))
        except (NotImplementedError, RuntimeError):
            return False

    def restore(self) -> None:
        """Put the bytes of every cloned storage back where they differ (read-only memory is then left alone)."""
        for key, clone in self._clones.items():
            storage, size, _ = self._held[key]
            if storage.nbytes() != size:
                storage.resize_(size)
            if not torch.equal(_bytes(storage), _bytes(clone)):
                storage.copy_(clone)

    def total_bytes(self) -> int:
        return sum(size for _, size, _ in self._held.values())

    def cloned_bytes(self) -> int:
        """The extra memory in use."""
        return sum(clone.nbytes() for clone in self._clones.values())

    def checksum(self) -> None:
        """Record a checksum of all protected memory (about 3 GB/s on one core)."""
        self._checksums = {key: _crc(storage) for key, (storage, _, _) in self._held.items()}

    def changed(self) -> list[str]:
        """Names of protected tensors whose memory differs from the recorded checksum."""
        return [self._held[k][2] for k, crc in self._checksums.items() if _crc(self._held[k][0]) != crc]


class CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows each vault every tensor that an operation is about to write."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in a session, so torch need not wrap the method below (and import its compiler)."""
        return False

    def __init__(self, vaults: tuple[Vault, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vaults = vaults

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, name in written_arguments(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    for vault in self._vaults:
                        vault.save(tensor)
        return func(*args, **kwargs)


class EscapeWatch(TorchFunctionMode):
    """Clones protected memory before it is handed out as a NumPy array or, with ``pointers``, as an address.

    Being a function mode, it also keeps ``nn.TransformerEncoderLayer`` off its fused path, which a probe's own
    hooks or modes would do anyway: so all runs of a session compute the same.
    """

    def __init__(self, vaults: tuple[Vault, ...], *, pointers: bool) -> None:
        super().__init__()
        self._vaults = vaults
        self._watched = _ESCAPES | _RAW_POINTERS if pointers else _ESCAPES

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._watched:
            for vault in self._vaults:
                vault.save(args[0])
        return func(*args, **(kwargs or {}))


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: the operators inside it are seen by themselves
        return ()
    base = schema.name.split("::")[-1]
    if torch.Tag.inplace_view in getattr(func, "tags", ()) and base not in _RESIZING:
        return ()  # transpose_, detach_, ...: only the tensor's view of its memory changes
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in WRITTEN_UNANNOTATED
    )


def _key(storage: torch.UntypedStorage) -> Key:
    return storage.device, storage.data_ptr()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor, in 8-byte words where that divides (4 times as fast to compare)."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    aligned = storage.nbytes() % 8 == 0 and storage.data_ptr() % 8 == 0
    return view.view(torch.int64) if aligned else view


def _crc(storage: torch.UntypedStorage) -> int:
    if storage.device.type == "cpu":
        # not by way of a NumPy view: making one forbids torch to resize the storage ever after
        return zlib.crc32((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))
    words = _bytes(storage)
    # on an accelerator: a wrapping sum of the words, each times its odd position, a piece at a time
    total = 0
    for start in range(0, words.numel(), 1 << 22):
        piece = words[start : start + (1 << 22)].to(torch.int64)
        weight = torch.arange(start, start + piece.numel(), device=piece.device).mul_(2).add_(1)
        total = (total + int((piece * weight).sum())) % 2**64
    return total
