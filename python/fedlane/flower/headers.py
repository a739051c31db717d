"""Layouts of records, as safetensors headers: what the engine knows of the bytes.

A header lists tensors in the order of their bytes and knows no column-major order. What else a
layout says stands in a remark of its metadata.
"""

import json

from fedlane import _core

from .arrays import FORTRAN, SMALL_BYTES, Entry, NotCarried


def header_of(layout: list[Entry]) -> bytes:
    """The header of a layout. Raises `NotCarried` where the engine cannot describe it."""
    placed = sorted(layout, key=lambda entry: entry.nbytes < SMALL_BYTES)
    fortran = [entry.name for entry in layout if entry.dtype.endswith(FORTRAN)]
    remark = {"order": [entry.name for entry in layout]} if placed != layout else {}
    remark |= {"fortran": fortran} if fortran else {}
    tensors = [(name, dtype.removesuffix(FORTRAN), list(shape)) for name, dtype, shape in placed]
    try:
        return _core.header(tensors, json.dumps(remark) if remark else "")
    except _core.ModelError as error:
        raise NotCarried(str(error)) from error


def layout_of(header: bytes) -> list[Entry]:
    """The layout that a header describes. Raises ValueError if its remark is not valid."""
    tensors, text = _core.tensors(header)
    try:
        remark = json.loads(text) if text else {}
        fortran = set(remark.get("fortran", ()))
        order = list(remark.get("order", [name for name, _, _ in tensors]))
        is_whole = sorted(order) == sorted(name for name, _, _ in tensors)
    except (AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"a header's remark is not valid: {error}") from error
    entries = {
        name: Entry(name, dtype + FORTRAN * (name in fortran), tuple(shape))
        for name, dtype, shape in tensors
    }
    if not is_whole:
        raise ValueError("a header's remark orders other tensors than it has")
    return [entries[name] for name in order]
