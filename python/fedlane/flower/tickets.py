"""What stands in Flower's messages instead of arrays: a few hundred bytes that say where they are.

A message to a client carries one *order*, under `ORDER`: where the server listens and the secret
of the client's update. A reply carries the client's word that the order was followed. Each
`ArrayRecord` becomes a *ticket* under the same name: the secret of a model on offer in a message,
the number of an update in a reply.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

#: Name of the record with the order, or with a client's word that it cannot be served.
ORDER = "fedlane"
#: Version of all this: a peer with another one is served Flower's own way.
VERSION = 1
#: ArrayRecords of one reply that are carried; further ones travel Flower's own way.
MAX_UPDATES = 64

_MODEL, _UPDATE = "fedlane.model", "fedlane.update"


def refuse_own_names(content: RecordDict) -> None:
    """Raises ValueError if an app uses a name that messages of this module have."""
    for name, record in content.items():
        if name == ORDER:
            raise ValueError(f"fedlane needs the name {name!r} in messages: give your record another one")
        taken = {_MODEL, _UPDATE} & set(record) if isinstance(record, ConfigRecord) else ()
        for key in taken:
            raise ValueError(
                f"fedlane needs the key {key!r} in messages: give it another name in your record {name!r}"
            )


def new_key() -> bytes:
    """A secret of 32 random bytes."""
    return secrets.token_bytes(32)


def update_key(key: bytes, number: int) -> bytes:
    """The secret of the reply's ArrayRecord number ``number``, from the order's."""
    return hashlib.blake2b(str(number).encode(), key=key, digest_size=32).digest()


def update_keys(key: bytes) -> list[bytes]:
    """The secrets of all updates that a reply may bring."""
    return [update_key(key, number) for number in range(MAX_UPDATES)]


@dataclass(frozen=True)
class Order:
    """How a client reaches the server, and what it replies with."""

    #: Host and port, best first.
    addresses: list[str]
    #: Name of the server's Unix socket; empty where it may not be used.
    local: str
    #: Secret of the updates.
    key: bytes
    #: Silence after which a peer is given up, in seconds.
    deadline_s: float
    #: The server's certificate, if the port has TLS: clients trust no other.
    certificate: bytes = b""

    def record(self) -> ConfigRecord:
        """As it stands in a message."""
        return ConfigRecord(
            {
                "version": VERSION,
                "addresses": self.addresses,
                "local": self.local,
                "key": self.key,
                "deadline-s": self.deadline_s,
                "certificate": self.certificate,
            }
        )

    @classmethod
    def of(cls, content: RecordDict) -> "Order | None":
        """The order in a message, if it has one that can be followed."""
        record = content.get(ORDER)
        if not isinstance(record, ConfigRecord) or record.get("version") != VERSION:
            return None
        # It is the same version's: these are the types of `record` above.
        values: dict[str, Any] = dict(record)
        names = "addresses", "local", "key", "deadline-s", "certificate"
        return cls(*(values[name] for name in names))


def model_ticket(key: bytes, nbytes: int) -> ConfigRecord:
    """Stands for a model of ``nbytes`` bytes that is on offer."""
    return ConfigRecord({_MODEL: key, "nbytes": nbytes})


def read_model_ticket(record: object) -> tuple[bytes, int] | None:
    """Secret and size of the model that ``record`` stands for."""
    if not isinstance(record, ConfigRecord) or _MODEL not in record:
        return None
    values: dict[str, Any] = dict(record)
    return values[_MODEL], values["nbytes"]


def update_ticket(number: int) -> ConfigRecord:
    """Stands for an update that waits at the client's host."""
    return ConfigRecord({_UPDATE: number})


def read_update_ticket(record: object) -> int | None:
    """Number of the update that ``record`` stands for."""
    if isinstance(record, ConfigRecord) and _UPDATE in record:
        number = record[_UPDATE]
        if isinstance(number, int) and 0 <= number < MAX_UPDATES:
            return number
    return None


def word() -> ConfigRecord:
    """A client's word that `fedlane_mod` has seen to a reply."""
    return ConfigRecord({"version": VERSION})


def has_word(content: RecordDict) -> bool:
    """Whether `fedlane_mod` has seen to a reply."""
    record = content.get(ORDER)
    return isinstance(record, ConfigRecord) and record.get("version") == VERSION


def refusal(reason: str) -> ConfigRecord:
    """A client's word that it cannot be served this way."""
    return ConfigRecord({"version": VERSION, "unreachable": reason[:400]})


def read_refusal(content: RecordDict) -> str | None:
    """The reason in a reply that is a refusal."""
    record = content.get(ORDER)
    if isinstance(record, ConfigRecord) and "unreachable" in record:
        return str(record["unreachable"])
    return None


def array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """Those of a message that have arrays: an empty one needs no carrying."""
    return {name: r for name, r in content.items() if isinstance(r, ArrayRecord) and len(r)}


def replaced(content: RecordDict, records: Mapping[str, Any]) -> RecordDict:
    """A copy with some records replaced and, where the new one is None, left out."""
    new = {name: records.get(name, record) for name, record in content.items()}
    new.update({name: record for name, record in records.items() if name not in new})
    return RecordDict({name: record for name, record in new.items() if record is not None})
