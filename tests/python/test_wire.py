"""Reads the examples of docs/WIRE.md with nothing but what the document says.

Rust compares the same examples with its encoder, so both together say that the document is enough to
write a peer from.
"""

import json
import pathlib
import re
import struct

import blake3
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def examples():
    text = (ROOT / "docs" / "WIRE.md").read_text()
    blocks = re.findall(r"^```hex (\S+)\n(.*?)^```", text, re.M | re.S)
    # The first 48 columns are bytes, the rest of a line is for people.
    return {name: bytes.fromhex(re.sub(r"(?m)^(.{0,48}).*$", r"\1", body)) for name, body in blocks}


EXAMPLES = examples()


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, length):
        piece = self.data[self.at : self.at + length]
        assert len(piece) == length
        self.at += length
        return piece

    def varint(self):
        number = shift = 0
        while True:
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7

    def text(self):
        return self.take(self.varint()).decode()

    def f64(self):
        return struct.unpack("<d", self.take(8))[0]

    def flag(self):
        byte = self.take(1)[0]
        assert byte in (0, 1)
        return byte == 1

    def ticket(self):
        """Of 32 bytes, or None."""
        return self.take(32) if self.flag() else None

    def ranges(self):
        return [range(self.varint(), self.varint()) for _ in range(self.varint())]


def message(name):
    """The number of a message, and a reader of its fields."""
    frame = Reader(EXAMPLES[name])
    (length,) = struct.unpack("<I", frame.take(4))
    body = Reader(frame.take(length))
    assert frame.at == len(frame.data)
    return body.varint(), body


def read(name, *kinds):
    number, body = message(name)
    assert f"-{number}-" in name
    fields = [body.take(kind) if isinstance(kind, int) else getattr(body, kind)() for kind in kinds]
    assert body.at == len(body.data)
    return fields


def chunk_sum(data):
    """CRC-64/NVME, bit by bit."""
    polynomial = int(f"{0xAD93D23594C93659:064b}"[::-1], 2)
    crc = 0xFFFF_FFFF_FFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (polynomial if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF_FFFF_FFFF


def u64(*numbers):
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def layout_digest(header):
    hasher = blake3.blake3(b"fedlane layout 1")
    tensors = json.loads(header)
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        for text in (name, tensor["dtype"]):
            hasher.update(u64(len(text.encode())) + text.encode())
        shape = tensor["shape"]
        hasher.update(u64(len(shape), *shape, *tensor["data_offsets"]))
    return hasher.digest()


CHUNK = np.array([1.0, 2.0], "<f4").tobytes()


def digest():
    _, _, header, *_ = join()
    hasher = blake3.blake3(derive_key_context="fedlane 2026 model digest")
    hasher.update(layout_digest(header) + u64(262_144) + u64(chunk_sum(CHUNK)))
    return hasher.digest()


def join():
    return read("client-message-0-join", "text", "f64", "text", 16, "ticket")


def plan():
    fields = read("aggregator-message-0-plan", 16, "varint", 32, *["varint"] * 4, "text")
    names = "session client ticket streams chunk_bytes rounds deadline_ms header".split()
    return dict(zip(names, fields, strict=True))


@pytest.mark.parametrize(
    "name, channel, answer",
    [
        ("preamble-control", 1, 0),
        ("preamble-data", 2, 0),
        ("answer-wrong-ticket", 2, 1),
        ("answer-taken", 2, 2),
        ("answer-expired", 2, 3),
        ("answer-no-place", 1, 4),
        ("answer-tls-wanted", 1, 5),
    ],
)
def test_preambles(name, channel, answer):
    assert struct.unpack("<8sHBB", EXAMPLES[name]) == (b"fedlane\0", 3, channel, answer)


SECRET = b"a secret of 32 bytes, never sent"


def keyed(key, *parts):
    return blake3.blake3(b"".join(parts), key=key).digest()


def keys(label):
    """One key of the control channel of the examples."""
    nonces = EXAMPLES["opening"][16:] + EXAMPLES["reply"][:32]
    context = "fedlane 2026 control channel"
    base = blake3.blake3(SECRET + nonces, derive_key_context=context).digest()
    return keyed(base, label)


def test_a_control_channel_is_opened():
    place = blake3.blake3(SECRET, derive_key_context="fedlane 2026 place").digest()
    assert EXAMPLES["opening"][:16] == place[:16]
    assert EXAMPLES["reply"][32:] == keys(b"the aggregator knows")
    assert EXAMPLES["client-proof"] == keys(b"the client knows")


def test_messages_are_sealed():
    data, key = Reader(EXAMPLES["sealed-messages"]), keys(b"from the client")
    for number in range(2):
        length = data.take(4)
        assert data.take(16) == keyed(key, u64(number), b"\0", length)[:16]
        message = data.take(*struct.unpack("<I", length))
        assert message == b"\x04"
        assert data.take(16) == keyed(key, u64(number), b"\1", message)[:16]
    assert data.at == len(data.data)


def test_the_ticket_proves_the_data_hello():
    hello, proof = EXAMPLES["data-hello"][:24], EXAMPLES["data-hello"][24:]
    assert struct.unpack("<16sII", hello) == (plan()["session"], plan()["client"], 2)
    key = keyed(keys(b"data channels"), plan()["ticket"])
    assert keyed(key, b"client", hello) == proof
    preamble, answer = EXAMPLES["answer-admitted"][:12], EXAMPLES["answer-admitted"][12:]
    assert struct.unpack("<8sHBB", preamble) == (b"fedlane\0", 3, 2, 0)
    assert keyed(key, b"aggregator", hello, proof) == answer


def test_join():
    name, count, header, place, resumes = join()
    assert (name, count, place, resumes) == ("site-a", 600.0, bytes(16), None)
    assert json.loads(header) == {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def test_plan():
    numbers = [plan()[name] for name in ("streams", "chunk_bytes", "rounds", "deadline_ms")]
    assert numbers == [4, 262_144, 300, 30_000]
    assert plan()["header"] == ""


@pytest.mark.parametrize("side", ["client", "aggregator"])
def test_sums(side):
    assert chunk_sum(b"123456789") == 0xAE8B_1486_0A79_9888
    first, count, total = read(f"{side}-message-2-sums", "varint", "varint", 8)
    assert (first, count, total) == (0, 1, u64(chunk_sum(CHUNK)))


def test_digests():
    assert read("client-message-3-received", "varint", 32) == [1, digest()]
    assert read("aggregator-message-1-download", "varint", 32) == [0, digest()]


@pytest.mark.parametrize(
    "name, number",
    [
        ("client-message-1-uploading", 1),
        ("aggregator-message-3-upload", 1),
    ],
)
def test_rounds(name, number):
    assert read(name, "varint") == [number]


def test_applied():
    assert read("aggregator-message-4-applied", "varint", "flag") == [300, False]
    fields = read("aggregator-message-4-applied-without", "varint", "flag", "text")
    assert fields == [300, True, "it was late"]


@pytest.mark.parametrize("name", ["client-message-7-want", "aggregator-message-8-want"])
def test_want(name):
    assert read(name, "varint", "ranges") == [1, [range(5, 300), range(1, 2)]]


@pytest.mark.parametrize("name", ["client-message-8-prove", "aggregator-message-9-prove"])
def test_prove(name):
    assert read(name, "varint", "ranges") == [0, [range(5)]]


def test_messages_without_numbers():
    assert read("client-message-5-failed", "text") == ["disk full"]
    assert read("aggregator-message-7-failed", "text") == ["out of memory"]
    for name in ("client-message-4-alive", "aggregator-message-5-done", "aggregator-message-6-alive"):
        assert read(name) == []


def veil(label):
    """What hides a key of round 1, attempt 0."""
    return keyed(keys(b"data channels"), label, struct.pack("<II", 1, 0))


def unveiled(veiled, label):
    return bytes(a ^ b for a, b in zip(veiled, veil(label), strict=True))


def test_ring():
    session, rounds, deadline_ms, header, shape, on_nonfinite = read(
        "aggregator-message-10-ring", 16, "varint", "varint", "text", "varint", "varint"
    )
    assert (session, rounds, deadline_ms, header) == (plan()["session"], 300, 30_000, "")
    assert (shape, on_nonfinite) == (0, 0)


def test_ready_and_turn():
    kinds = ["varint", "varint", "f64", "text", "varint", 32, "text"]
    fields = read("client-message-9-ready", *kinds)
    assert fields.pop() == ""
    assert fields[:5] == [1, 0, 600.0, "", 40_000]
    assert unveiled(fields[5], b"a key from the client") == plan()["ticket"]
    ranks = ["varint", "text", "f64", "text", "f64"]
    kinds = [*["varint"] * 3, *ranks, "varint", "varint", "text", 32, "text"]
    fields = read("aggregator-message-11-turn", *kinds)
    assert fields.pop() == ""
    assert fields[:3] == [1, 0, 1]
    assert fields[3:8] == [2, "site-a", 600.0, "site-b", 200.0]
    assert fields[8:11] == [2, 524_288, "10.0.0.1:40000"]
    assert unveiled(fields[11], b"a key for the client.") == plan()["ticket"]


def test_the_end_of_an_attempt():
    assert read("client-message-10-reduced", "varint", "varint", 32) == [1, 0, digest()]
    broken = read("client-message-11-broken", *["varint"] * 2, *["flag"] * 3, "text")
    assert broken == [1, 0, True, False, False, "it was closed"]
    assert read("aggregator-message-12-halt", "varint", "varint", "text") == [
        1,
        0,
        "site-c is gone",
    ]


def test_a_tree():
    joined = read("client-message-12-join-as-edge", "text", "f64", "text", 16, "flag")
    assert (joined[0], joined[1], joined[4]) == ("edge-a", 800.0, False)
    leaf = ["text", "f64", "flag"]
    fields = read(
        "client-message-13-leaves",
        *["varint", "flag", "varint", "flag", "varint", "varint", *leaf, *leaf, "text", "flag"],
    )
    # A zigzag varint: -11.
    assert fields[:6] == [1, True, 21, False, 0, 2]
    assert fields[6:] == ["site-a", 600.0, False, "site-b", 200.0, True, "is gone", True]
    fold = read("aggregator-message-13-fold", "varint", "flag", "varint", "flag", 32)
    assert fold == [1, True, 21, True, digest()]
