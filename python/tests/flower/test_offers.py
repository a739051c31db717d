"""Models on offer, and how a host's pool takes them: without Flower's processes."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from harness import wait_until

pytest.importorskip("fedlane.flower")

from fedlane import FedlaneError, _core
from fedlane.flower import tickets
from fedlane.flower.host import import_path
from fedlane.flower.server import Server
from fedlane.pool import Pool


def record(value: float) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(5000, value, np.float32))})


@pytest.fixture
def server():
    return Server("127.0.0.1", 0, deadline_s=5.0, streams=1, same_host=False)


def knows(server: Server, key: bytes) -> bool:
    try:
        _core.call(server._route("test"), key)
    except FedlaneError:
        return False
    return True


def test_the_same_record_is_the_same_offer(server):
    one = record(1)
    assert server.offer(one) is server.offer(one)
    assert server.offer(record(1)) is not server.offer(one)


def test_models_that_are_not_kept_are_withdrawn(server):
    first, second, third = (server.offer(record(value)) for value in range(3))
    server.keep_offers({first.key, third.key})
    assert [knows(server, each.key) for each in (first, second, third)] == [True, False, True]


def test_all_who_wait_for_a_model_hear_of_its_failure(monkeypatch):
    asked, fail = [], threading.Event()

    def fetch(*_: object):
        asked.append(1)
        assert fail.wait(30)
        raise FedlaneError("told to fail")

    monkeypatch.setattr(_core, "fetch", fetch)
    pool, failures = Pool(), []

    def ask() -> None:
        try:
            pool.model(b"k" * 32, _core.Route("127.0.0.1:9", "test", deadline_s=1.0))
        except FedlaneError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for each in threads:
        each.start()
    waiting = lambda: [len(each._condition._waiters) for each in pool._models.values()]  # noqa: E731
    assert wait_until(lambda: waiting() == [2], 30)
    fail.set()
    for each in threads:
        each.join()
    assert failures == ["told to fail"] * 3
    assert len(asked) == 1
    ask()
    assert len(asked) == 2, "who comes later tries again"


def test_a_pool_finds_fedlane_wherever_it_was_imported_from():
    """Flower may have installed it for one run, in a folder that no other Python knows."""
    env = {"PYTHONPATH": os.pathsep.join(import_path())}
    alone = [sys.executable, "-S", "-c", "import fedlane.pool"]
    assert subprocess.run(alone, env=env, capture_output=True).returncode == 0
    assert subprocess.run(alone, env={}, capture_output=True).returncode != 0


def test_with_tls_a_key_alone_opens_nothing():
    """Nor does the certificate of another port."""
    port, other = (
        Server("127.0.0.1", 0, deadline_s=5.0, streams=1, same_host=False, tls=True) for _ in range(2)
    )
    offer = port.offer(record(1))
    assert knows(port, offer.key)
    address = f"127.0.0.1:{port.exchange.port}"
    for certificate, why in ((b"", "TLS is wanted here"), (other.exchange.certificate, "TLS:")):
        route = _core.Route(address, "test", deadline_s=5.0, certificate=certificate)
        with pytest.raises(FedlaneError, match=why):
            _core.fetch(route, offer.key, _core.Pool())


def test_what_is_no_certificate_is_refused():
    with pytest.raises(FedlaneError, match="TLS:"):
        _core.Route("127.0.0.1:9", "test", deadline_s=5.0, certificate=b"none")


def test_with_tls_the_order_has_the_certificate():
    order = tickets.Order(["127.0.0.1:9"], "", tickets.new_key(), 5.0, b"certificate")
    assert tickets.Order.of(RecordDict({tickets.ORDER: order.record()})) == order
