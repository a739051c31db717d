import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypedDict, final

__all__ = [
    "Aggregator",
    "Client",
    "Deposit",
    "DlpackTensor",
    "Edge",
    "Exchange",
    "FedlaneError",
    "GoneError",
    "Mean",
    "Memory",
    "ModelError",
    "OutOfMemory",
    "Parcel",
    "PeerError",
    "Pool",
    "Region",
    "Ring",
    "Route",
    "__version__",
    "average",
    "call",
    "fetch",
    "header",
    "load",
    "save",
    "tensors",
]

__version__: str

# Called with the phase ("upload" or "download"), the client's name, the bytes done and the bytes
# of the model.
_Progress: TypeAlias = Callable[[str, str, int, int], object]
_Path: TypeAlias = str | PathLike[str]

class FedlaneError(Exception): ...
class ModelError(FedlaneError): ...
class PeerError(FedlaneError): ...
class GoneError(PeerError): ...
class OutOfMemory(FedlaneError): ...

@final
class DlpackTensor:
    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Region:
    def __new__(
        cls,
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> Self: ...
    # Values are numpy.ndarray or torch.Tensor; neither has to be installed.
    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Any], *, metadata: Mapping[str, str] | None = None
    ) -> Region: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def metadata(self) -> dict[str, str]: ...
    def dtype(self, name: str) -> str: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    # numpy.ndarray
    def numpy(self, name: str) -> Any: ...
    # torch.Tensor
    def torch(self, name: str) -> Any: ...
    def dlpack(self, name: str) -> DlpackTensor: ...
    def fileno(self) -> int: ...
    # Before 3.12 the buffer protocol has no method that Python sees.
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

class _EdgeRound(TypedDict):
    round: int
    counted: bool
    clients: list[str]
    left_out: dict[str, str]

class _Update(TypedDict):
    client: str
    round: int
    bytes: int
    elements: int
    nonfinite: int
    first_nonfinite: tuple[str, int] | None
    norm: float | None
    counted: bool
    rejected: Literal["nonfinite", "too_large"] | None
    clip_factor: float
    zeroed: bool
    weight: float

@final
class Aggregator:
    def __new__(
        cls,
        address: str,
        *,
        clients: int,
        min_clients: int | None = None,
        rounds: int = 1,
        order: Literal["arrival", "client"] = "arrival",
        topology: Literal["star", "tree"] = "star",
        deadline_ms: int = 30_000,
        round_deadline: float | None = None,
        reconnect: float | None = None,
        on_nonfinite: Literal["reject", "zero", "keep"] = "reject",
        clip_norm: float | None = None,
        on_loss: Literal["redo", "spool", "auto"] = "auto",
        max_model_bytes: int | None = None,
        progress: _Progress | None = None,
        secret: bytes | None = None,
        insecure: bool = False,
        tls_cert: _Path | None = None,
        tls_key: _Path | None = None,
        tls_client_ca: _Path | None = None,
        allow: Sequence[str] | None = None,
    ) -> Self: ...
    @property
    def address(self) -> str: ...
    @property
    def counted(self) -> list[str]: ...
    @property
    def left_out(self) -> dict[str, str]: ...
    @property
    def updates(self) -> list[_Update]: ...
    def gather(self, model: Region | None = None) -> dict[str, float]: ...
    def round(self) -> Region: ...
    def collect(self) -> Region: ...
    def send(self, model: Region) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Edge:
    def __new__(
        cls,
        address: str,
        above: str,
        *,
        clients: int,
        name: str,
        local_rounds: int = 1,
        min_clients: int | None = None,
        order: Literal["arrival", "client"] = "arrival",
        deadline_ms: int = 30_000,
        secret: bytes | None = None,
        above_secret: bytes | None = None,
        insecure: bool = False,
        tls_cert: _Path | None = None,
        tls_key: _Path | None = None,
        above_tls_ca: _Path | None = None,
    ) -> Self: ...
    @property
    def address(self) -> str: ...
    def run(self) -> list[_EdgeRound]: ...

@final
class Ring:
    def __new__(
        cls,
        address: str,
        *,
        name: str,
        model: Region,
        ranks: int | None = None,
        min_ranks: int | None = None,
        deadline_ms: int = 30_000,
        secret: bytes | None = None,
        insecure: bool = False,
        advertise: str | None = None,
        topology: Literal["ring", "chain"] | None = None,
        on_nonfinite: Literal["reject", "zero", "keep"] | None = None,
        tls_ca: _Path | None = None,
        tls_name: str | None = None,
        tls_cert: _Path | None = None,
        tls_key: _Path | None = None,
        tls_client_ca: _Path | None = None,
    ) -> Self: ...
    @property
    def address(self) -> str: ...
    @property
    def members(self) -> dict[str, float]: ...
    def all_reduce(self, region: Region, weight: float = 1.0) -> Region: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Client(Iterator[int]):
    def __new__(
        cls,
        address: str,
        *,
        name: str,
        examples: float,
        model: Region,
        deadline_ms: int = 30_000,
        progress: _Progress | None = None,
        secret: bytes | None = None,
        tls_ca: _Path | None = None,
        tls_name: str | None = None,
        tls_cert: _Path | None = None,
        tls_key: _Path | None = None,
    ) -> Self: ...
    @property
    def model(self) -> Region: ...
    @property
    def left_out(self) -> str | None: ...
    @property
    def rounds(self) -> int: ...
    def send(self, update: Region | None = None) -> bool: ...
    def close(self) -> None: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

def save(region: Region, path: _Path) -> None: ...
def load(path: _Path) -> Region: ...

# For fedlane.flower and fedlane.pool.

def header(tensors: Sequence[tuple[str, str, Sequence[int]]], remark: str) -> bytes:
    """The safetensors header of tensors (name, dtype, shape) that follow each other without holes.

    The remark stands in its metadata. Raises ModelError for a dtype or name that has no header.
    """

def tensors(header: bytes) -> tuple[list[tuple[str, str, list[int]]], str]:
    """The tensors of a header (name, dtype, shape) in the order of their bytes, and the remark."""

@final
class Pool:
    """Warm memory: what was used and given back serves again."""

    def __new__(cls) -> Self: ...
    def take(self, nbytes: int, owner: str | None = None) -> Memory:
        """Memory of ``nbytes`` bytes, which goes back to the pool when nothing refers to it.

        Nobody but ``owner`` has ever written to it; without one, any bytes may stand in it.
        """

    def warm(self, nbytes: int, count: int) -> None:
        """Makes sure that ``count`` pieces of ``nbytes`` bytes are free, while nobody waits for them."""

    def trim(self) -> None:
        """Gives free memory back to the host."""

    @property
    def free_bytes(self) -> int:
        """Bytes of memory that is free here, and not the host's."""

@final
class Memory:
    """Memory of a pool."""

    def fileno(self) -> int:
        """The memory file; byte 0 is at position 0."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

@final
class Parcel:
    """A model or update in a memory file, with the checksums of its chunks."""

    @staticmethod
    def adopt(header: bytes, fd: int, position: int) -> Parcel:
        """The bytes of memory file ``fd`` from ``position`` on, which ``header`` describes."""

    @staticmethod
    def within(header: bytes, memory: Memory, position: int) -> Parcel:
        """The bytes of ``memory`` from ``position`` on, which stays taken from its pool as long."""

    @property
    def header(self) -> bytes:
        """What the bytes mean."""

    @property
    def nbytes(self) -> int:
        """Bytes of the model."""

    @property
    def position(self) -> int:
        """Where the first byte stands in the memory file."""

    def fileno(self) -> int:
        """The memory file."""

@final
class Mean:
    """The sums of a mean that more updates may come to."""

    def __new__(cls) -> Self: ...

@final
class Exchange:
    """A listening port where models are offered and updates are awaited. Keys are 32 secret bytes."""

    def __new__(
        cls,
        host: str,
        port: int,
        *,
        deadline_s: float = 30.0,
        streams: int | None = None,
        max_update_bytes: int | None = None,
        tls: bool = False,
    ) -> Self: ...
    @property
    def port(self) -> int:
        """The port that it listens on."""

    @property
    def certificate(self) -> bytes:
        """With TLS, what clients know it by: made for this exchange alone. Nothing without."""

    @property
    def pool(self) -> Pool:
        """The pool that collected updates and means stand in."""

    def offer(self, key: bytes, model: Parcel) -> None:
        """Offers a model to everyone who knows ``key``, until it is released."""

    def expect(self, key: bytes) -> None:
        """Awaits the update whose client knows ``key``."""

    def release(self, key: bytes) -> None:
        """Ends an offer, or lets go of an update."""

    def has_met(self, name: str) -> bool:
        """Whether a client of this name has ever come."""

    def header(self, key: bytes, patience_s: float) -> bytes:
        """The header of the update that waits under ``key``; waits for its client."""

    def collect(self, key: bytes, patience_s: float) -> Parcel:
        """Receives one update whole, and releases it."""

    def average(self, updates: Sequence[tuple[bytes, float]], patience_s: float) -> Parcel:
        """The mean of updates (key, weight), in this order. A PeerError's ``key`` says whose fault it is."""

    def add(self, mean: Mean, updates: Sequence[tuple[bytes, float]], patience_s: float) -> None:
        """Adds updates (key, weight), in this order, to the sums of a mean. An error loses the sums."""

    def finish(self, mean: Mean) -> Parcel:
        """The mean of all updates that were added."""

@final
class Route:
    """How a client reaches an exchange, and under which name.

    ``certificate`` is that of the exchange, if it has TLS; else None, or empty. Raises FedlaneError if it
    is something else.
    """

    def __new__(
        cls, address: str, name: str, *, deadline_s: float, certificate: bytes | None = None
    ) -> Self: ...

@final
class Deposit:
    """An update that waits until the exchange releases it."""

    def __new__(cls, route: Route, key: bytes, update: Parcel) -> Self: ...
    @property
    def is_over(self) -> bool:
        """Whether the update is released, or given up."""

    @property
    def failure(self) -> str | None:
        """Why it was given up, if it was."""

def fetch(route: Route, key: bytes, pool: Pool, owner: str | None = None) -> Parcel:
    """Takes the model that is offered under ``key``, of one ``owner`` if that is said."""

def call(route: Route, key: bytes) -> None:
    """Asks whether the exchange can be reached and knows ``key``."""

def average(updates: Sequence[tuple[Parcel, float]], pool: Pool) -> Parcel:
    """The mean of updates that are on this host, in this order, in memory of ``pool``."""
