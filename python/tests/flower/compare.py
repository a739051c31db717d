"""Compares results of the same app with and without fedlane."""

import base64

import numpy as np

TICKET_BYTES = 1024
MESSAGE_RECORD_BYTES = 2048


def unpack(packed: dict[str, list]) -> dict[str, np.ndarray]:
    """The arrays that `probes.pack` wrote."""
    return {name: np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
            for name, (dtype, shape, data) in packed.items()}


def differences(expected: dict[str, list], actual: dict[str, list]) -> list[str]:
    """Where two packed models differ in a bit, in words; empty when they do not."""
    found = [f"{name} is missing on one side" for name in expected.keys() ^ actual.keys()]
    for name in expected.keys() & actual.keys():
        if expected[name][:2] != actual[name][:2]:
            found.append(f"{name} is {actual[name][:2]}, expected {expected[name][:2]}")
        elif expected[name] != actual[name]:
            one, other = unpack({name: expected[name]})[name], unpack({name: actual[name]})[name]
            unlike = int((one.ravel().view(f"V{one.itemsize}") != other.ravel().view(f"V{one.itemsize}")).sum())
            found.append(f"{name} ({one.dtype}): {unlike} of {one.size} elements differ")
    return found


def assert_plain(result: dict) -> None:
    """Flower carried the arrays itself, in both directions."""
    for way in ("down", "up"):
        assert sum(each["array_bytes"] for each in result[way]) > 50_000, f"{way}: no arrays"


def assert_through_fedlane(result: dict) -> None:
    """Flower carried no arrays at all, and no large record."""
    for way in ("down", "up"):
        assert sum(each["array_bytes"] for each in result[way]) == 0, f"{way}: Flower carried arrays itself"
        assert max(each["largest_record_bytes"] for each in result[way]) < MESSAGE_RECORD_BYTES
        assert 0 < max(each["largest_ticket_bytes"] for each in result[way]) < TICKET_BYTES
