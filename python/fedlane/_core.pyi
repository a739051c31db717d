import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, final

__all__ = [
    "Aggregator",
    "Client",
    "DlpackTensor",
    "FedlaneError",
    "ModelError",
    "OutOfMemory",
    "PeerError",
    "Region",
    "__version__",
    "load",
    "save",
]

__version__: str

# Called with the phase ("upload" or "download"), the client's name, the bytes done and the bytes
# of the model.
_Progress: TypeAlias = Callable[[str, str, int, int], object]
_Path: TypeAlias = str | PathLike[str]

class FedlaneError(Exception): ...
class ModelError(FedlaneError): ...
class PeerError(FedlaneError): ...
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

@final
class Aggregator:
    def __new__(
        cls,
        address: str,
        *,
        clients: int,
        rounds: int = 1,
        order: Literal["arrival", "client"] = "arrival",
        deadline_ms: int = 30_000,
        progress: _Progress | None = None,
    ) -> Self: ...
    @property
    def address(self) -> str: ...
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
    ) -> Self: ...
    @property
    def model(self) -> Region: ...
    @property
    def rounds(self) -> int: ...
    def send(self, update: Region | None = None) -> None: ...
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
