"""What the pickle of ``torch.save`` describes, without running it.

``pickletools`` decodes the operations; the few that plain tensors need are carried out on descriptions: a name stays a
name, a tensor is the place, shape and strides it claims. Nothing is imported, called or allocated for the file, so
that neither its code nor its sizes can do harm; memory and time are bounded by the number of operations.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, cast

from normscope.targets.state_files.values import INT64, extent, row_major

PICKLE_BYTES = 64 * 2**20
OPERATIONS = 3_000_000
"""of one pickle; a state dict of 100,000 tensors needs 2,500,000"""


class NotPlain(Exception):
    """The file asks for what plain tensors do not need; ``args[0]`` names it."""


class Broken(Exception):
    """No pickle that ``torch.save`` writes; ``args[0]`` says why."""


@dataclass(frozen=True)
class Name:
    """A class or function that the file names."""

    text: str


@dataclass(frozen=True)
class Storage:
    key: str
    kind: str
    """``FloatStorage``"""
    count: int
    """elements that it claims; bytes for an untyped one"""


@dataclass(frozen=True)
class Described:
    """A dense tensor: where it claims to be."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Opaque:
    """Something else that a state dict may hold: a sparse tensor, a device, a set."""


OPAQUE = Opaque()
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
UNTYPED = "UntypedStorage"
"""counted in bytes; the tensor names its dtype"""
KNOWN = re.compile(
    r"collections\.(OrderedDict|Counter)|builtins\.(set|bytearray|complex)|__builtin__\.(set|bytearray|complex)"
    r"|_codecs\.encode|torch\.(Size|device|Tensor|bool|(float|bfloat|u?int|complex|bits|qu?int)[0-9]\w*)"
    r"|torch\.per_(tensor|channel)_\w+"
    r"|torch\.(cuda\.)?[A-Z]\w*(Storage|Tensor)|torch\.storage\.(Typed|Untyped)Storage"
    r"|torch\._utils\._rebuild_\w+|torch\._tensor\._rebuild_from_type_v2|torch\.serialization\._get_layout"
    r"|torch\.nn\.parameter\.(Parameter|Buffer)"
)
"""what PyTorch loads with ``weights_only=True``; a name is all that becomes of it here"""
REBUILT = (
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v3",
)
PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")


class _Mark:
    pass


MARK = _Mark()
CONSTANTS = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
}
MAKE: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_SET": lambda: OPAQUE,
    "EMPTY_TUPLE": tuple,
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip


class Within:
    """A file that gives at most ``limit`` bytes; what lies beyond cannot be asked for."""

    def __init__(self, file: BinaryIO, limit: int = PICKLE_BYTES) -> None:
        self.file, self.left = file, limit

    def read(self, count: int = -1) -> bytes:
        if count < 0 or count > self.left:
            raise Broken("it asks for more bytes than a state dict has")
        data = self.file.read(count)
        self.left -= len(data)
        return data

    def readline(self) -> bytes:
        data = self.file.readline(min(self.left, 2**16))
        self.left -= len(data)
        return data


def described(file: Within) -> Any:
    """What the next pickle of the file describes.

    Raises:
        NotPlain: it names a class or function that plain tensors do not need.
        Broken: it is no pickle, or none that ``torch.save`` writes.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    count = 0
    try:
        for operation, argument, _ in pickletools.genops(
            cast(IO[bytes], file)
        ):  # read and readline are all it uses
            count += 1
            if count > OPERATIONS:
                raise Broken(f"its pickle has more than {OPERATIONS} operations")
            if operation.name == "STOP":
                return stack.pop()
            _perform(operation.name, argument, stack, memo)
    except (NotPlain, Broken):
        raise
    except Exception as error:  # whatever a wrong operand does: an empty stack, a name where a list should be
        raise Broken(f"its pickle is damaged ({type(error).__name__})") from None
    raise Broken("its pickle has no end")


def _perform(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in VALUES:
        stack.append(argument)
    elif name in CONSTANTS:
        stack.append(CONSTANTS[name])
    elif name in MAKE:
        stack.append(MAKE[name]())
    elif name == "MARK":
        stack.append(MARK)
    elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
        memo[int(argument)] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[int(argument)])
    elif name in TUPLES:
        items = stack[-TUPLES[name] :]
        del stack[-TUPLES[name] :]
        stack.append(tuple(items))
    elif name in ("TUPLE", "LIST", "DICT"):
        items = _since_mark(stack)
        stack.append(tuple(items) if name == "TUPLE" else items if name == "LIST" else _set({}, items))
    elif name in ("APPEND", "APPENDS", "ADDITEMS"):
        items = [stack.pop()] if name == "APPEND" else _since_mark(stack)
        if isinstance(stack[-1], list):
            stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _last_two(stack) if name == "SETITEM" else _since_mark(stack)
        if isinstance(stack[-1], dict):
            _set(stack[-1], items)
    elif name in ("GLOBAL", "INST"):
        stack.append(_named(argument.replace(" ", ".", 1)))
    elif name == "STACK_GLOBAL":
        module, attribute = _last_two(stack)
        if type(module) is not str or type(attribute) is not str:
            raise Broken("its pickle is damaged (a name that is no string)")
        stack.append(_named(f"{module}.{attribute}"))
    elif name == "REDUCE":
        function, given = _last_two(stack)
        stack.append(_reduced(function, given))
    elif name == "BINPERSID":
        stack.append(_storage(stack.pop()))
    elif name == "BUILD":
        stack.pop()  # attributes, such as the version of a state dict
    elif name == "POP":
        stack.pop()
    elif name == "POP_MARK":
        _since_mark(stack)
    elif name not in ("PROTO", "FRAME"):
        raise NotPlain(f"the operation {name}, which plain tensors do not need")


def _since_mark(stack: list[Any]) -> list[Any]:
    place = len(stack) - 1
    while stack[place] is not MARK:
        place -= 1
        if place < 0:
            raise Broken("its pickle is damaged (no mark)")
    items = stack[place + 1 :]
    del stack[place:]
    return items


def _last_two(stack: list[Any]) -> list[Any]:
    second, first = stack.pop(), stack.pop()
    return [first, second]


def _set(target: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    """Entries under strings and integers; what stands under another key is no part of a state dict."""
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) in (str, int):
            target[key] = value
    return target


def _named(text: str) -> Name:
    if not KNOWN.fullmatch(text):
        raise NotPlain(re.sub(r"[^\w.]", "?", text[:120]))
    return Name(text)


def _reduced(function: Any, given: Any) -> Any:
    """What a call would make, where it is a tensor or a dictionary."""
    name = function.text if isinstance(function, Name) else ""
    if not name:
        raise NotPlain(f"a call of {type(function).__name__}")
    if name == "torch._tensor._rebuild_from_type_v2":
        return _reduced(given[0], given[2])
    if name == "collections.OrderedDict":
        return {}
    if name in PARAMETERS:
        return given[0]
    if name in REBUILT and isinstance(given[0], Storage):
        storage, offset, shape, strides = given[:4]
        return _tensor(storage, offset, shape, strides, given[6] if name.endswith("v3") else None)
    return OPAQUE


def _tensor(storage: Storage, offset: Any, shape: Any, strides: Any, dtype: Any) -> Any:
    kind = dtype.text.removeprefix("torch.") if isinstance(dtype, Name) else STORAGES.get(storage.kind, "")
    if not kind:
        return OPAQUE  # quantized
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and 0 <= n <= INT64 for n in numbers):
        raise Broken("a tensor has sizes that are no whole numbers from 0 on")
    return Described(storage, kind, offset, tuple(shape), tuple(strides))


def _storage(given: Any) -> Storage:
    """``("storage", type, key, location, elements[, ...])``."""
    tag, kind, key, _, count = given[:5]
    if tag != "storage" or not isinstance(kind, Name) or type(key) is not str or type(count) is not int:
        raise Broken("a storage is described in another way than torch.save does")
    if len(given) > 5 and given[5] is not None:
        raise Broken("a storage is a view of another one, as PyTorch before 0.4 wrote it")
    if not 0 <= count <= INT64:
        raise Broken(f"a storage has {count} elements")
    return Storage(key, kind.text.rpartition(".")[2], count)


def dense(tensor: Described) -> bool:
    """Its elements stand one after the other."""
    return tensor.strides == row_major(tensor.shape) or extent(tensor.shape, tensor.strides) <= 1
