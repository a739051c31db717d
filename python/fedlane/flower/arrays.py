"""Flower's `Array` and `ArrayRecord` with their bytes in memory files instead of `np.save` bytes.

`install()` changes the two classes in place. An array of `SMALL_BYTES` or more whose dtype is plain
then has a `Backing`, a range of a memory file, and is sent from there and received there. What apps
and strategies see stays as Flower made it: `data` are the same bytes (written when asked for),
`numpy()` gives a fresh writable array, `object_id`, equality and pickles are the same. Everything
else (small arrays, strings, objects, foreign byte order, ...) is left to Flower's own code.

A record travels as its *layout* (name, dtype, shape of each array, in record order) and its bytes:
first the large arrays, in record order, then the small ones, in record order, without holes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import io
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord

from .memory import Arena, Memory, Views, Workspace, empty_memory

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 4096  # below this an array stays with Flower. Part of the format: both ends must agree
MAX_DIMENSIONS = 64  # NumPy's own limit
NPY_STYPE = "numpy.ndarray"
RAW_STYPE = "fedlane.raw"  # the bare bytes of a dtype that np.save cannot name
FORTRAN = ":F"  # ends the dtype of a layout entry whose bytes stand in column-major order

PLAIN_DTYPES = {
    str(dtype): dtype
    for dtype in map(
        np.dtype,
        ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
    )
}
RAW_ITEM_BYTES = {
    "bfloat16": 2,
    "float8_e3m4": 1,
    "float8_e4m3": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}

_BACKING = "_fedlane"  # where an Array keeps its Backing, beside Flower's own fields in __dict__


class NotCarried(Exception):
    """fedlane does not move this record; send it Flower's own way. The text names the array."""


class ArrayNotHere(RuntimeError):
    """The array was read, but its bytes are elsewhere. The text says what to do instead."""


class UnknownFlower(RuntimeError):
    """Flower's classes are not as this version of fedlane knows them."""


class Entry(NamedTuple):
    """One array of a layout. `dtype` is NumPy's name ("float32", "bfloat16"), plus ":F" if column-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


class Backing:
    """Where the bytes of an Array stand: `nbytes` from `offset` on in the memory of `views`."""

    __slots__ = ("dtype", "fortran", "nbytes", "offset", "shape", "views")

    def __init__(self, views: Views, offset: int, entry: Entry) -> None:
        self.views = views
        self.offset = offset
        self.nbytes = entry.nbytes
        self.dtype, self.fortran = _split_order(entry.dtype)
        self.shape = entry.shape

    @property
    def memory(self) -> Memory:
        return self.views.memory

    @property
    def stype(self) -> str:
        return RAW_STYPE if self.dtype in RAW_ITEM_BYTES else NPY_STYPE

    @property
    def data_bytes(self) -> int:
        """The length of `data()`, which is not made for it."""
        return len(self._header()) + self.nbytes

    def data(self) -> bytes:
        """What Flower would have stored: a new copy, at each call."""
        return b"".join((self._header(), self.payload().data))

    def payload(self) -> np.ndarray:
        """The bytes, uint8. Not to be written to."""
        return self.memory.private()[self.offset : self.offset + self.nbytes]

    def numpy(self) -> np.ndarray:
        """A writable array that is independent of everything else, like Flower's."""
        dtype = _numpy_dtype(self.dtype)
        source, offset = self._fresh(dtype.alignment)
        return np.ndarray(self.shape, dtype, source, offset, order="F" if self.fortran else "C")

    def torch(self) -> torch.Tensor:
        """The same as a torch tensor, for a dtype that NumPy does not have."""
        source, offset = self._fresh(RAW_ITEM_BYTES[self.dtype])
        return _torch_tensor(np.ndarray(self.nbytes, np.uint8, source, offset), self.dtype, self.shape)

    def _fresh(self, alignment: int) -> tuple[np.ndarray, int]:
        """Bytes that belong to the caller alone, and the offset of the array in them."""
        if not _state.eager and self.offset % alignment == 0:
            lent = self.views.lend(self.offset, self.nbytes)
            if lent is not None:
                return lent, self.offset
        workspace = _state.workspace
        copy = workspace.take(self.nbytes) if workspace is not None else None
        if copy is None:
            copy = np.empty(self.nbytes, np.uint8)
        self.memory.read_into(copy, self.offset)
        return copy, 0

    def _header(self) -> bytes:
        return b"" if self.dtype in RAW_ITEM_BYTES else _npy_header(self.dtype, self.shape, self.fortran)


class _Placeholder:
    """Stands for the bytes of an Array that are not in this process."""

    stype = NPY_STYPE

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], why: str) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.why = why

    def data(self) -> bytes:
        raise ArrayNotHere(f"array {self.name!r} is not here: {self.why}")

    numpy = torch = data

    @property
    def data_bytes(self) -> int:
        return len(self.data())


class _State:
    """How this process makes and reads arrays."""

    arena = Arena()
    eager = False
    workspace: Workspace | None = None


_state = _State()
_install_lock = threading.Lock()
_originals: dict[type, dict[str, Any]] = {}


def _after_fork() -> None:
    _state.arena = Arena()  # the parent goes on writing into the other one


os.register_at_fork(after_in_child=_after_fork)


# Installing


def install() -> None:
    """Change Flower's classes in place, once. Safe to call again and from any thread.

    Raises UnknownFlower, and changes nothing, if the classes are not as expected.
    """
    with _install_lock:
        if _originals:
            return
        _check_before()
        patches = {Array: _ARRAY_PATCH, ArrayRecord: _RECORD_PATCH}
        for cls, patch in patches.items():
            _originals[cls] = {name: cls.__dict__.get(name) for name in patch}
        for cls, patch in patches.items():
            for name, value in patch.items():
                setattr(cls, name, value)
        try:
            _check_after()
        except BaseException:
            _uninstall()
            raise


def configure(
    *, arena: Arena | None = None, eager: bool | None = None, workspace: Workspace | None = None
) -> None:
    """Set where new arrays are put, and how `numpy()` makes its result, for the whole process.

    Lazy (the default): a copy-on-write view, which costs nothing until it is read; right for a
    server, and for clients that load the arrays into a model of their own. Eager: a copy; right for
    apps that train in the arrays themselves, because a page written to costs three times a copy.
    The copies stand in the workspace, as long as it has room.
    """
    _state.workspace = workspace
    if arena is not None:
        _state.arena = arena
    if eager is not None:
        _state.eager = eager


def arena() -> Arena:
    """The arena that new arrays of this process are put into."""
    return _state.arena


def _uninstall() -> None:
    for cls, names in _originals.items():
        for name, value in names.items():
            if value is None:
                delattr(cls, name)
            else:
                setattr(cls, name, value)
    _originals.clear()


def _check_before() -> None:
    if sys.byteorder != "little":
        raise UnknownFlower(
            "fedlane moves little-endian arrays, this machine is big-endian: remove fedlane from the app"
        )
    for cls, patch in ((Array, _ARRAY_PATCH), (ArrayRecord, _RECORD_PATCH)):
        for name in patch.keys() - _NEW_NAMES:
            _expect(name in cls.__dict__, f"{cls.__name__}.{name} is missing")
        for name in patch.keys() & _NEW_NAMES:
            _expect(name not in cls.__dict__, f"{cls.__name__}.{name} is new")
    fields = [field.name for field in dataclasses.fields(Array)]
    _expect(fields == ["dtype", "shape", "stype", "data"], f"Array has the fields {fields}")
    values = np.arange(SMALL_BYTES, dtype=np.float32)
    _expect(vars(Array(values)).get("data") == _np_save(values), "Array.data is not what np.save writes")
    _expect("_data" in vars(ArrayRecord()), "ArrayRecord keeps its arrays elsewhere")


def _check_after() -> None:
    values = np.arange(SMALL_BYTES, dtype=np.float32)
    array = ArrayRecord({"a": Array(values)})["a"]
    _expect(_BACKING in vars(array), "Array(ndarray) or ArrayRecord(dict) goes another way")
    _expect(array.data == _np_save(values), "Array.data is read in another way")
    _expect(np.array_equal(array.numpy(), values), "Array.numpy goes another way")
    array.data = b"x"
    _expect(array.data == b"x" and _BACKING not in vars(array), "Array.data is set in another way")


def _expect(condition: bool, what: str) -> None:
    if not condition:
        version = importlib.metadata.version("flwr")
        raise UnknownFlower(
            f"fedlane does not know flwr {version}: {what}. "
            "Install a fedlane made for it, or a flwr from 1.34 to 1.42, or remove fedlane from the app"
        )


def _np_save(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()


# Array


def _get_data(self: Array) -> bytes:
    fields = self.__dict__
    while True:
        backing = fields.get(_BACKING)
        if backing is not None:
            return backing.data()
        try:
            return fields["data"]
        except KeyError:
            # Another thread may have given the array a backing between the two look-ups.
            if _BACKING not in fields:
                raise AttributeError("'Array' object has no attribute 'data'") from None


def _set_data(self: Array, value: bytes) -> None:
    self.__dict__["data"] = value
    self.__dict__.pop(_BACKING, None)


def _delete_data(self: Array) -> None:
    _get_data(self)
    self.__dict__.pop("data", None)
    self.__dict__.pop(_BACKING, None)


def _from_numpy_ndarray(cls: type[Array], ndarray: np.ndarray) -> Array:
    """Create Array from NumPy ndarray."""
    array = _from_raw_ndarray(ndarray) or _from_plain_ndarray(ndarray)
    return array or _originals[Array]["from_numpy_ndarray"].__func__(cls, ndarray)


def _from_plain_ndarray(ndarray: np.ndarray) -> Array | None:
    """Copy an array into the arena; None if it is one for Flower."""
    if type(ndarray) not in (np.ndarray, np.memmap) or ndarray.nbytes < SMALL_BYTES:
        return None
    dtype = ndarray.dtype
    if dtype.name not in PLAIN_DTYPES or PLAIN_DTYPES[dtype.name] != dtype or dtype.metadata is not None:
        return None
    # np.save keeps column-major order and so must we: sums over the array depend on it.
    fortran = ndarray.flags.f_contiguous and not ndarray.flags.c_contiguous
    payload = _bytes_of(ndarray.T if fortran else ndarray)
    return _store(dtype.name + FORTRAN * fortran, ndarray.shape, payload)


def _from_raw_ndarray(ndarray: np.ndarray) -> Array | None:
    """Take an ml_dtypes array, which np.save would turn into bare void; None if it is none."""
    if not isinstance(ndarray, np.ndarray) or ndarray.dtype.type.__module__ != "ml_dtypes":
        return None
    if ndarray.dtype.name not in RAW_ITEM_BYTES:
        return None
    return _from_raw_bytes(ndarray.dtype.name, ndarray.shape, _bytes_of(ndarray))


def _from_raw_bytes(dtype: str, shape: Iterable[int], payload: np.ndarray) -> Array:
    shape = tuple(shape)
    if len(payload) < SMALL_BYTES:
        return Array(dtype=dtype, shape=shape, stype=RAW_STYPE, data=payload.tobytes())
    return _store(dtype, shape, payload)


def _store(dtype: str, shape: tuple[int, ...], payload: np.ndarray) -> Array:
    views, offset = _state.arena.store(payload)
    return _backed_array(Backing(views, offset, Entry("", dtype, shape)))


def _backed_array(backing: Backing | _Placeholder, like: Array | None = None) -> Array:
    """Make an Array without going through its constructor, which wants bytes."""
    source = backing if like is None else like
    array = Array.__new__(Array)
    array.__dict__.update(
        dtype=source.dtype,
        shape=tuple(source.shape),
        stype=source.stype,
        _is_dirty=True,
        **{_BACKING: backing},
    )
    return array


def _bytes_of(ndarray: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(ndarray).reshape(-1).view(np.uint8)


def _from_torch_tensor(cls: type[Array], tensor: torch.Tensor) -> Array:
    """Create Array from PyTorch tensor."""
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if dtype not in RAW_ITEM_BYTES or "torch" not in sys.modules:
        return _originals[Array]["from_torch_tensor"].__func__(cls, tensor)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    payload = flat.view(sys.modules["torch"].uint8).numpy()
    return _from_raw_bytes(dtype, tensor.shape, payload)


def _numpy(self: Array) -> np.ndarray:
    """Return the array as a NumPy array."""
    backing = self.__dict__.get(_BACKING)
    if backing is not None and self.stype == backing.stype:
        return backing.numpy()
    if self.stype == RAW_STYPE:
        payload = bytearray(_raw_payload(self))
        return np.ndarray(self.shape, _numpy_dtype(self.dtype), payload)
    return _originals[Array]["numpy"](self)


def to_torch(array: Array) -> torch.Tensor:
    """Return an Array as a fresh torch tensor, bfloat16 and float8 included. Needs torch imported."""
    torch = sys.modules["torch"]
    backing = array.__dict__.get(_BACKING)
    if array.stype != RAW_STYPE:
        return torch.from_numpy(array.numpy())
    if backing is not None:
        return backing.torch()
    return _torch_tensor(np.frombuffer(bytearray(_raw_payload(array)), np.uint8), array.dtype, array.shape)


def _torch_tensor(flat: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    torch = sys.modules["torch"]
    torch_dtype = getattr(torch, dtype, None)
    if torch_dtype is None:
        raise TypeError(
            f"the array is {dtype}, which torch {torch.__version__} does not have: install a newer torch"
        )
    return torch.from_numpy(flat).view(torch_dtype).reshape(shape)


def _raw_payload(array: Array) -> bytes:
    """The data of a raw Array without backing, checked: it may come from another machine."""
    data, expected = array.data, math.prod(array.shape) * RAW_ITEM_BYTES.get(array.dtype, 0)
    if array.dtype not in RAW_ITEM_BYTES or len(data) != expected:
        raise TypeError(
            f"an Array of {array.dtype} and shape {array.shape} cannot have {len(data)} raw bytes"
        )
    return data


def _numpy_dtype(name: str) -> np.dtype:
    if name in PLAIN_DTYPES:
        return PLAIN_DTYPES[name]
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError):
        raise TypeError(
            f"the array is {name}, which NumPy does not have: "
            "install a recent ml_dtypes, or use ArrayRecord.to_torch_state_dict()"
        ) from None


@lru_cache(maxsize=4096)
def _npy_header(dtype: str, shape: tuple[int, ...], fortran: bool) -> bytes:
    header = io.BytesIO()
    fields = {"descr": PLAIN_DTYPES[dtype].str, "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()


def _getstate(self: Array) -> dict[str, Any]:
    """Pickle as Flower's own Array, which a process without fedlane can read."""
    state = dict(self.__dict__)
    if isinstance(state.get(_BACKING), Backing):
        del state[_BACKING]
        state.pop("_chunks", None)  # views of `data`, made again when needed
        state["data"] = self.data
    return state


def _copy(self: Array) -> Array:
    new = type(self).__new__(type(self))
    new.__dict__.update(self.__dict__)
    return new


def _deepcopy(self: Array, memo: dict[int, Any]) -> Array:
    new = memo[id(self)] = type(self).__new__(type(self))
    fields = dict(self.__dict__)
    if _BACKING in fields:
        new.__dict__[_BACKING] = fields.pop(_BACKING)  # its bytes never change
        fields.pop("_chunks", None)
    new.__dict__.update(deepcopy(fields, memo))
    return new


def _repr(self: Array) -> str:
    backing = self.__dict__.get(_BACKING)
    if not isinstance(backing, _Placeholder):
        return _originals[Array]["__repr__"](self)
    fields = f"dtype={self.dtype!r}, shape={self.shape!r}, stype={self.stype!r}"
    return f"Array({fields}, data=<not here: {backing.why}>)"


def placeholder(name: str, dtype: str, shape: tuple[int, ...], why: str) -> Array:
    """Make an Array without bytes. Reading it raises ArrayNotHere with `why`, which says what to do."""
    return _backed_array(_Placeholder(name, dtype, shape, why))


# ArrayRecord


def _from_array_dict(
    cls: type[ArrayRecord], array_dict: dict[str, Array], *, keep_input: bool = True
) -> ArrayRecord:
    """Create ArrayRecord from a dictionary of :class:`Array`."""
    record = ArrayRecord()
    for key, array in array_dict.items():
        record[key] = _rewrap(array)
    if not keep_input:
        array_dict.clear()
    _settle(record)
    return record


def _rewrap(array: Array) -> Array:
    backing = array.__dict__.get(_BACKING)
    if backing is not None:
        return _backed_array(backing, like=array)
    return Array(dtype=array.dtype, shape=tuple(array.shape), stype=array.stype, data=array.data)


def _from_numpy_ndarrays(
    cls: type[ArrayRecord], ndarrays: list[np.ndarray], *, keep_input: bool = True
) -> ArrayRecord:
    """Create ArrayRecord from a list of NumPy ``ndarray``."""
    record = ArrayRecord()
    _state.arena.make_room(_large_bytes(ndarray.nbytes for ndarray in ndarrays))
    for i in range(len(ndarrays)):
        record[str(i)] = Array.from_numpy_ndarray(ndarrays[i])
        if not keep_input:
            ndarrays[i] = None  # type: ignore[call-overload]
    if not keep_input:
        ndarrays.clear()
        gc.collect()
    _settle(record)
    return record


def _from_torch_state_dict(
    cls: type[ArrayRecord], state_dict: dict[str, torch.Tensor], *, keep_input: bool = True
) -> ArrayRecord:
    """Create ArrayRecord from PyTorch ``state_dict``."""
    if "torch" not in sys.modules:
        return _originals[ArrayRecord]["from_torch_state_dict"].__func__(
            cls, state_dict, keep_input=keep_input
        )
    record = ArrayRecord()
    _state.arena.make_room(_large_bytes(t.numel() * t.element_size() for t in state_dict.values()))
    for key in list(state_dict.keys()):
        record[key] = Array.from_torch_tensor(state_dict[key] if keep_input else state_dict.pop(key))
    _settle(record)
    return record


def _large_bytes(sizes: Iterable[int]) -> int:
    return sum(nbytes for nbytes in sizes if nbytes >= SMALL_BYTES)


def _to_numpy_ndarrays(self: ArrayRecord, *, keep_input: bool = True) -> list[np.ndarray]:
    """Return the ArrayRecord as a list of NumPy ``ndarray``."""
    if keep_input:
        return [array.numpy() for array in self.values()]
    ndarrays = [self.pop(key).numpy() for key in list(self.keys())]
    gc.collect()
    return ndarrays


def _to_torch_state_dict(self: ArrayRecord, *, keep_input: bool = True) -> Any:
    """Return the ArrayRecord as a PyTorch ``state_dict``."""
    original = _originals[ArrayRecord]["to_torch_state_dict"]
    if "torch" not in sys.modules or all(array.stype != RAW_STYPE for array in self.values()):
        return original(self, keep_input=keep_input)
    state_dict = original(ArrayRecord())  # an empty one of Flower's type
    for key in list(self.keys()):
        state_dict[key] = to_torch(self[key] if keep_input else self.pop(key))
    return state_dict


def _count_bytes(self: ArrayRecord) -> int:
    """Return number of Bytes stored in this object, those of the keys included."""
    return sum(len(key) + _data_bytes(array) for key, array in self.items())


def _data_bytes(array: Array) -> int:
    backing = array.__dict__.get(_BACKING)
    return backing.data_bytes if backing is not None else len(array.data)


_ARRAY_PATCH: dict[str, Any] = {
    "data": property(_get_data, _set_data, _delete_data),
    "from_numpy_ndarray": classmethod(_from_numpy_ndarray),
    "from_torch_tensor": classmethod(_from_torch_tensor),
    "numpy": _numpy,
    "__repr__": _repr,
    "__getstate__": _getstate,
    "__copy__": _copy,
    "__deepcopy__": _deepcopy,
}
_RECORD_PATCH: dict[str, Any] = {
    "from_array_dict": classmethod(_from_array_dict),
    "from_numpy_ndarrays": classmethod(_from_numpy_ndarrays),
    "from_torch_state_dict": classmethod(_from_torch_state_dict),
    "to_numpy_ndarrays": _to_numpy_ndarrays,
    "to_torch_state_dict": _to_torch_state_dict,
    "count_bytes": _count_bytes,
}
_NEW_NAMES = {"data", "__getstate__", "__copy__", "__deepcopy__"}  # what Flower's classes do not have


# Layouts


def item_bytes(dtype: str) -> int:
    """The size of one element. Raises ValueError for a dtype that fedlane does not carry."""
    name, _ = _split_order(dtype)
    if name in PLAIN_DTYPES:
        return PLAIN_DTYPES[name].itemsize
    if name in RAW_ITEM_BYTES:
        return RAW_ITEM_BYTES[name]
    raise ValueError(f"fedlane does not carry arrays of {dtype}")


def _split_order(dtype: str) -> tuple[str, bool]:
    return dtype.removesuffix(FORTRAN), dtype.endswith(FORTRAN)


def layout(record: ArrayRecord) -> tuple[list[Entry], int]:
    """Return the layout of a record and its size in bytes. Raises NotCarried."""
    entries = [entry for entry, _ in _inspect(record)]
    return entries, layout_bytes(entries)


def layout_bytes(layout: list[Entry]) -> int:
    """The size of a record with this layout."""
    return sum(Entry(*entry).nbytes for entry in layout)


def offsets(layout: list[Entry]) -> list[int]:
    """Where each array of a layout begins, in bytes from the beginning of the record."""
    sizes = [Entry(*entry).nbytes for entry in layout]
    result = [0] * len(sizes)
    end = 0
    for large in (True, False):
        for i, nbytes in enumerate(sizes):
            if (nbytes >= SMALL_BYTES) == large:
                result[i] = end
                end += nbytes
    return result


_Source = Backing | memoryview


def _inspect(record: ArrayRecord) -> list[tuple[Entry, _Source]]:
    """Find the bytes of every array of a record. Raises NotCarried, ArrayNotHere."""
    return [_inspect_array(key, array) for key, array in record.items()]


def _inspect_array(key: str, array: Array) -> tuple[Entry, _Source]:
    backing = array.__dict__.get(_BACKING)
    if isinstance(backing, _Placeholder):
        backing.data()
    entry = Entry(key, array.dtype, tuple(array.shape))
    if backing is None:
        return _inspect_data(entry, array.stype, memoryview(array.data))
    if entry[1:] != (backing.dtype, backing.shape) or array.stype != backing.stype:
        raise NotCarried(f"array {key!r} says that it is {entry.dtype} {entry.shape}, but its bytes are not")
    return entry._replace(dtype=backing.dtype + FORTRAN * backing.fortran), backing


def _inspect_data(entry: Entry, stype: str, data: memoryview) -> tuple[Entry, memoryview]:
    """Find the payload in Flower's bytes. Only what np.save would write here again is taken."""
    if stype == RAW_STYPE and entry.dtype in RAW_ITEM_BYTES and len(data) == entry.nbytes:
        return entry, data
    if stype == NPY_STYPE and entry.dtype in PLAIN_DTYPES:
        for fortran in (False, True):
            header = _npy_header(entry.dtype, entry.shape, fortran)
            if data[: len(header)] == header and len(data) == len(header) + entry.nbytes:
                return entry._replace(dtype=entry.dtype + FORTRAN * fortran), data[len(header) :]
    raise NotCarried(
        f"array {entry.name!r} ({entry.dtype} {entry.shape}, stype {stype!r}) has no plain bytes"
    )


def contents(record: ArrayRecord) -> list[tuple[str, object]]:
    """What each array of a record holds: equal for two looks if nothing was changed between them."""
    return [(key, _Same(array.__dict__.get(_BACKING) or array.data)) for key, array in record.items()]


class _Same:
    """Equal to one that holds the very same object, which therefore lives."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held


def gather(
    record: ArrayRecord, allocate: Callable[[int], Memory], *, adopt: bool = False
) -> tuple[Memory, int, list[Entry]]:
    """Return (memory, offset, layout): the bytes of a record, contiguous, in the order of its layout.

    Nothing is copied if the large arrays stand one behind the other in one memory, as those made
    one after the other do, and the small ones follow or there is room for them. Otherwise memory is
    taken from `allocate` and all are copied. With `adopt`, each array then moves into that memory
    as soon as it is copied, so that a model is held once; its content stays the same.

    Raises NotCarried if the record has to go Flower's own way, ArrayNotHere, MemoryError.
    """
    found = _inspect(record)
    entries = [entry for entry, _ in found]
    place = _in_place(found)
    if place is None:
        place = _copy_record(record, found, allocate, adopt)
    return *place, entries


def _in_place(found: list[tuple[Entry, _Source]]) -> tuple[Memory, int] | None:
    """Return where the record stands already, after adding its small arrays if there is room."""
    large = [source for entry, source in found if entry.nbytes >= SMALL_BYTES]
    if not large or not isinstance(large[0], Backing):
        return None
    memory, end = large[0].memory, large[0].offset
    for source in large:
        if not isinstance(source, Backing) or source.memory is not memory or source.offset != end:
            return None
        end += source.nbytes
    small = b"".join(source for entry, source in found if isinstance(source, memoryview))
    if small and memory.append(small, at=end) is None and not _has(memory, end, small):
        return None
    _state.arena.end_record(memory, end + len(small))
    return memory, large[0].offset


def _has(memory: Memory, offset: int, content: bytes) -> bool:
    """Whether the small arrays were put there before, or came there."""
    return offset + len(content) <= memory.used and memory.read(offset, len(content)) == content


def _copy_record(
    record: ArrayRecord, found: list[tuple[Entry, _Source]], allocate: Callable[[int], Memory], adopt: bool
) -> tuple[Memory, int]:
    total = sum(entry.nbytes for entry, _ in found)
    if any(isinstance(source, Backing) for _, source in found):
        _state.arena.expect(total)  # the arena cut this record in pieces; not the next one
    memory = empty_memory(allocate, max(total, 1))
    views = Views(memory)
    for large in (True, False):
        for i, (entry, source) in enumerate(found):
            if (entry.nbytes >= SMALL_BYTES) != large:
                continue
            payload = source.payload() if isinstance(source, Backing) else source
            offset = memory.append(payload)
            if offset is None:
                raise MemoryError(f"memory of {memory.nbytes} bytes has no room for array {entry.name!r}")
            if adopt and large:
                _adopt_array(record[entry.name], Backing(views, offset, entry))
                found[i] = (entry, memoryview(b""))  # the last reference to the old bytes
            del payload, source
    return memory, 0


def adopt(record: ArrayRecord, memory: Memory, offset: int, layout: list[Entry]) -> None:
    """Let the large arrays of a record stand in `memory`, where `gather` put equal bytes.

    Frees what held them before, array by array. Raises ValueError if the layout is another one.
    """
    layout = [Entry(*entry) for entry in layout]
    if [entry for entry, _ in _inspect(record)] != layout:
        raise ValueError("the record was changed since it was gathered: gather it again")
    views = Views(memory)
    for entry, start in zip(layout, offsets(layout), strict=True):
        if entry.nbytes >= SMALL_BYTES:
            _adopt_array(record[entry.name], Backing(views, offset + start, entry))


def _adopt_array(array: Array, backing: Backing) -> None:
    # In this order: a reader in another thread finds one or the other.
    array.__dict__[_BACKING] = backing
    array.__dict__.pop("data", None)
    array.__dict__.pop("_chunks", None)


def scatter(memory: Memory, offset: int, layout: list[Entry]) -> ArrayRecord:
    """Make a record of the bytes in `memory` from `offset` on; its large arrays stay there.

    Raises ValueError if the layout, which may come from another machine, is not valid or the
    memory is too short for it.
    """
    layout = [_checked(entry) for entry in layout]
    total = layout_bytes(layout)
    if offset < 0 or offset + total > memory.nbytes:
        raise ValueError(
            f"the arrays need {total} bytes from byte {offset} on, the memory has {memory.nbytes}"
        )
    views = Views(memory)
    record = ArrayRecord()
    for entry, start in zip(layout, offsets(layout), strict=True):
        if entry.name in record:
            raise ValueError(f"two arrays are named {entry.name!r}")
        backing = Backing(views, offset + start, entry)
        record[entry.name] = _backed_array(backing) if entry.nbytes >= SMALL_BYTES else _small_array(backing)
    return record


def _small_array(backing: Backing) -> Array:
    data = backing._header() + backing.memory.read(backing.offset, backing.nbytes)
    return Array(dtype=backing.dtype, shape=backing.shape, stype=backing.stype, data=data)


def _checked(entry: Any) -> Entry:
    name, dtype, shape = entry
    if not isinstance(name, str) or not isinstance(dtype, str):
        raise ValueError(f"the name and dtype of an array must be text, not {name!r} and {dtype!r}")
    if len(shape) > MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"array {name!r} has the shape {shape!r}")
    item_bytes(dtype)
    return Entry(name, dtype, tuple(shape))


def _settle(record: ArrayRecord) -> None:
    """Put the small arrays of a new record behind its large ones, before another array goes there."""
    backings = (array.__dict__.get(_BACKING) for array in record.values())
    if not any(isinstance(backing, Backing) and _state.arena.holds(backing.memory) for backing in backings):
        return
    # Otherwise it goes Flower's own way, later, and nothing is lost.
    with contextlib.suppress(NotCarried, ArrayNotHere):
        _in_place(_inspect(record))
