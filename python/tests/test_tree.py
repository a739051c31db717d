"""fedlane.Edge: a tree has the mean of all, and names them."""

from concurrent.futures import ThreadPoolExecutor

import fedlane
import numpy as np
import pytest

DEADLINE_MS = 60_000


def region(value):
    return fedlane.Region.from_arrays({"w": np.full(100_003, value, np.float32)})


def take_part(address, name, value, examples):
    client = fedlane.Client(
        address, name=name, examples=examples, model=region(value), deadline_ms=DEADLINE_MS
    )
    with client:
        for _ in client:
            client.send(region(value))
        return client.model.numpy("w").copy()


@pytest.mark.parametrize("order", ["arrival", "client"])
def test_the_mean_of_all_clients(order):
    top = fedlane.Aggregator(
        "127.0.0.1:0", clients=2, rounds=2, order=order, topology="tree", deadline_ms=DEADLINE_MS
    )
    with ThreadPoolExecutor() as pool, top:
        edges = [
            fedlane.Edge(
                "127.0.0.1:0",
                top.address,
                clients=2,
                name=f"edge-{number}",
                order=order,
                deadline_ms=DEADLINE_MS,
            )
            for number in range(2)
        ]
        running = [pool.submit(edge.run) for edge in edges]
        clients = [
            pool.submit(take_part, edges[n // 2].address, f"c{n}", 1.0 + n, 2.0**n) for n in range(4)
        ]
        assert top.gather() == {"edge-0": 3.0, "edge-1": 12.0}
        for _ in range(2):
            mean = top.round()
        assert top.counted == ["edge-0/c0", "edge-0/c1", "edge-1/c2", "edge-1/c3"]
        assert top.left_out == {}
    expected = np.float32((1 + 2 * 2 + 3 * 4 + 4 * 8) / 15)
    np.testing.assert_array_almost_equal_nulp(mean.numpy("w"), np.full(100_003, expected), 2)
    for client in clients:
        np.testing.assert_array_equal(client.result(60), mean.numpy("w"))
    for number, edge in enumerate(running):
        rounds = edge.result(60)
        names = [f"c{2 * number}", f"c{2 * number + 1}"]
        assert rounds == [
            {"round": round, "counted": True, "clients": names, "left_out": {}} for round in (1, 2)
        ]
    with pytest.raises(fedlane.FedlaneError, match="has run already"):
        edges[0].run()


def test_an_edge_without_an_aggregator_above():
    edge = fedlane.Edge("127.0.0.1:0", "127.0.0.1:9", clients=1, name="e", deadline_ms=1_000)
    with ThreadPoolExecutor() as pool:
        client = pool.submit(take_part, edge.address, "a", 1.0, 1)
        with pytest.raises(fedlane.PeerError, match="above this edge"):
            edge.run()
        with pytest.raises(fedlane.PeerError, match="above this edge"):
            client.result(60)


def test_what_an_edge_refuses():
    with pytest.raises(ValueError, match="local rounds: 0 is not between 1 and"):
        fedlane.Edge("127.0.0.1:0", "127.0.0.1:9", clients=1, name="e", local_rounds=0)
    with pytest.raises(ValueError, match='order is "arrival" or "client"'):
        fedlane.Edge("127.0.0.1:0", "127.0.0.1:9", clients=1, name="e", order="name")
    with pytest.raises(ValueError, match='topology is "star" or "tree"'):
        fedlane.Aggregator("127.0.0.1:0", clients=1, topology="ring")
