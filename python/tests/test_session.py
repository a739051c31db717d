"""Aggregator and clients, in threads and in processes, compared with NumPy."""

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fedlane
import ml_dtypes
import numpy as np
import pytest
from conftest import LONG_MS, layout, mean
from safetensors.numpy import load_file

EXAMPLE = Path(__file__).parent.parent / "examples" / "linear_model.py"


def arrays(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "layer.weight": random.normal(size=(300, 700)).astype(np.float32),
        "half": random.normal(size=(1001,)).astype(ml_dtypes.bfloat16),
        "wide": random.normal(size=(7, 0)),
        "double": random.normal(size=(33,)),
        "count": np.asarray(random.integers(0, 1000)),
    }


def start(aggregator, **arguments) -> fedlane.Client:
    arguments = {"examples": 1, "deadline_ms": LONG_MS} | arguments
    return fedlane.Client(aggregator.address, **arguments)


def listen(**arguments) -> fedlane.Aggregator:
    return fedlane.Aggregator("127.0.0.1:0", **({"deadline_ms": LONG_MS} | arguments))


def assert_mean(region: fedlane.Region, updates: list[dict], weights: list[float]) -> None:
    for name in region.names:
        got = region.numpy(name).astype(np.float64)
        want = mean([update[name] for update in updates], weights).astype(np.float64)
        if updates[0][name].dtype.kind == "i":
            assert (abs(got - want) <= 1).all()
        else:
            eps = float(ml_dtypes.finfo(updates[0][name].dtype).eps)
            # Terms of both signs may cancel: what counts is their size, which is a few units.
            assert np.allclose(got, want, rtol=eps, atol=8 * eps)


def test_means_of_several_rounds_in_threads():
    rounds, weights = 3, [3.0, 1.0]

    def take_part(index: int) -> fedlane.Region:
        region = fedlane.Region.from_arrays(arrays(0))
        with start(aggregator, name=f"c{index}", examples=weights[index], model=region) as client:
            assert client.rounds == rounds
            for number in client:
                update = arrays(10 * number + index)
                for name in client.model.names:
                    client.model.numpy(name)[...] = update[name]
                client.send()
        return client.model

    with ThreadPoolExecutor() as pool, listen(clients=2, rounds=rounds) as aggregator:
        clients = [pool.submit(take_part, index) for index in range(2)]
        assert aggregator.gather() == {"c0": 3.0, "c1": 1.0}
        for number in range(1, rounds + 1):
            model = aggregator.round()
            updates = [arrays(10 * number + index) for index in range(2)]
            assert_mean(model, updates, weights)
            last = bytes(memoryview(model))
            # It is ours: what we write does not reach anybody.
            model.numpy("double")[:] = np.nan
        aggregator.finish()
        for client in clients:
            assert bytes(memoryview(client.result(60))) == last


def test_an_initial_model_and_a_step_of_the_server():
    initial = fedlane.Region.from_arrays({"w": np.arange(5, dtype=np.float32)})

    def take_part(name: str) -> list[list[float]]:
        seen = []
        with start(aggregator, name=name, model=fedlane.Region(layout(initial))) as client:
            for _ in client:
                seen.append(client.model.numpy("w").tolist())
                client.model.numpy("w")[:] += 1
                client.send(client.model)
        return [*seen, client.model.numpy("w").tolist()]

    with ThreadPoolExecutor() as pool, listen(clients=2, rounds=2) as aggregator:
        clients = [pool.submit(take_part, name) for name in "ab"]
        aggregator.gather(initial)
        initial.numpy("w")[:] = 0
        for _ in range(2):
            collected = aggregator.collect()
            collected.numpy("w")[:] *= 10
            other = fedlane.Region({"w": ("float32", (6,))})
            with pytest.raises(fedlane.ModelError, match='"w" has the shape'):
                aggregator.send(other)
            aggregator.send(collected)
        aggregator.finish()
        steps = np.arange(5)
        expected = [steps, (steps + 1) * 10, ((steps + 1) * 10 + 1) * 10]
        for client in clients:
            assert client.result(60) == [list(step) for step in expected]


def test_a_round_may_end_before_all_were_run():
    def take_part() -> int:
        with start(aggregator, name="a", model=fedlane.Region({"w": ("float32", ())})) as client:
            for number in client:
                client.send()
        return number

    with ThreadPoolExecutor() as pool, listen(clients=1, rounds=5) as aggregator:
        client = pool.submit(take_part)
        aggregator.gather()
        aggregator.round()
        aggregator.finish()
        assert client.result(60) == 1
        with pytest.raises(fedlane.FedlaneError, match="finished"):
            aggregator.round()


def test_progress_reaches_the_end_and_what_it_raises_comes_out():
    calls = []

    def take_part() -> None:
        with start(aggregator, name="a", model=fedlane.Region({"w": ("float32", (100,))})) as client:
            for _ in client:
                client.send()

    def progress(*call) -> None:
        calls.append(call)
        if len(calls) > 1:
            raise ZeroDivisionError

    with ThreadPoolExecutor() as pool, listen(clients=1, rounds=2, progress=progress) as aggregator:
        client = pool.submit(take_part)
        aggregator.gather()
        with pytest.raises(ZeroDivisionError):
            aggregator.round()
        assert isinstance(client.exception(60), fedlane.PeerError)
    assert calls == [("upload", "a", 400, 400), ("download", "a", 400, 400)]


def test_wrong_use_is_refused_and_leaves_the_session_as_it_was():
    def take_part() -> None:
        with start(aggregator, name="a", model=fedlane.Region({"w": ("float32", ())})) as client:
            with pytest.raises(fedlane.FedlaneError, match="no update is wanted"):
                client.send()
            for _ in client:
                with pytest.raises(fedlane.FedlaneError, match="was not sent"):
                    next(client)
                with pytest.raises(fedlane.ModelError, match='"v" is not expected'):
                    client.send(fedlane.Region({"w": ("float32", ()), "v": ("int8", (1,))}))
                client.send()
            assert list(client) == []
        with pytest.raises(fedlane.FedlaneError, match="closed"):
            next(client)

    with ThreadPoolExecutor() as pool, listen(clients=1) as aggregator:
        with pytest.raises(fedlane.FedlaneError, match="gather"):
            aggregator.round()
        client = pool.submit(take_part)
        aggregator.gather()
        with pytest.raises(fedlane.FedlaneError, match="here already"):
            aggregator.gather()
        aggregator.round()
        with pytest.raises(fedlane.FedlaneError, match="all 1 rounds"):
            aggregator.round()
        aggregator.finish()
        client.result(60)


def test_the_reason_travels():
    def leave() -> None:
        with start(aggregator, name="a", model=fedlane.Region({"w": ("float32", ())})):
            raise RuntimeError("no data")

    with ThreadPoolExecutor() as pool, listen(clients=1) as aggregator:
        client = pool.submit(leave)
        with pytest.raises(fedlane.PeerError, match='client "a".*RuntimeError: no data'):
            aggregator.gather()
            aggregator.round()
        assert isinstance(client.exception(60), RuntimeError)
        with pytest.raises(fedlane.FedlaneError, match="ended with an error"):
            aggregator.round()


def test_leaving_early_tells_the_clients_why():
    def stay() -> None:
        with start(aggregator, name="a", model=fedlane.Region({"w": ("float32", ())})) as client:
            for _ in client:
                client.send()

    with ThreadPoolExecutor() as pool:
        with listen(clients=1, rounds=2) as aggregator:
            client = pool.submit(stay)
            aggregator.gather()
            aggregator.round()
        with pytest.raises(fedlane.PeerError, match="closed after 1 of 2 rounds"):
            client.result(60)


def test_models_that_do_not_fit():
    def join(name: str, dtype: str) -> None:
        with start(aggregator, name=name, model=fedlane.Region({"w": (dtype, ())})) as client:
            list(client)

    with ThreadPoolExecutor() as pool, listen(clients=2) as aggregator:
        clients = [pool.submit(join, "a", "float32"), pool.submit(join, "b", "float64")]
        with pytest.raises(fedlane.PeerError, match='"w" is F'):
            aggregator.gather()
        assert all(isinstance(client.exception(60), fedlane.PeerError) for client in clients)
    with listen(clients=1) as aggregator, pytest.raises(fedlane.ModelError, match="not averaged"):
        aggregator.gather(fedlane.Region({"w": ("complex64", (2,))}))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"clients": 0}, ValueError),
        ({"clients": -1}, OverflowError),
        ({"clients": 10**9}, ValueError),
        ({"clients": 1, "rounds": 0}, ValueError),
        ({"clients": 1, "deadline_ms": 1}, ValueError),
        ({"clients": 1, "order": "name"}, ValueError),
        ({"clients": "2"}, TypeError),
        ({}, TypeError),
    ],
)
def test_bad_settings_of_an_aggregator(arguments, error):
    with pytest.raises(error):
        listen(**arguments)


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:99999", "192.0.2.1:7733"])
def test_addresses_that_cannot_be_listened_on(address):
    with pytest.raises(fedlane.FedlaneError, match="cannot listen on"):
        fedlane.Aggregator(address, clients=1)


def test_bad_settings_of_a_client():
    region = fedlane.Region({})
    with pytest.raises(fedlane.PeerError, match="cannot reach"):
        fedlane.Client("127.0.0.1:1", name="a", examples=1, model=region)
    with pytest.raises(ValueError, match="deadline_ms"):
        fedlane.Client("127.0.0.1:1", name="a", examples=1, model=region, deadline_ms=0)
    with pytest.raises(TypeError):
        fedlane.Client("127.0.0.1:1", name="a", examples=1, model={})
    with listen(clients=1) as aggregator, ThreadPoolExecutor() as pool:
        gathered = pool.submit(aggregator.gather)
        with pytest.raises(fedlane.PeerError, match="NaN"):
            start(aggregator, name="a", examples=float("nan"), model=region)
        assert isinstance(gathered.exception(60), fedlane.PeerError)


def test_close_ends_a_call_of_another_thread():
    with ThreadPoolExecutor() as pool:
        aggregator = listen(clients=1)
        waiting = pool.submit(aggregator.gather)
        region = fedlane.Region({"w": ("float32", ())})
        with start(aggregator, name="a", model=region) as client:
            waiting.result(60)
            asked = threading.Event()
            task = pool.submit(lambda: (asked.set(), next(client)))
            assert asked.wait(60)
            client.close()
            assert isinstance(task.exception(60), fedlane.FedlaneError)
        aggregator.close()
        aggregator.close()


def run(*arguments: str, directory: Path) -> subprocess.Popen:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=directory)


def test_the_example_learns_in_three_processes(tmp_path):
    server = run("aggregate", "127.0.0.1:0", directory=tmp_path)
    address = server.stdout.readline().split()[-1]
    clients = [run("train", address, name, directory=tmp_path) for name in ("north", "south")]
    lines = server.communicate(timeout=120)[0].splitlines()
    assert [process.wait(60) for process in (server, *clients)] == [0, 0, 0]
    last = re.fullmatch(r"round 20: y = (\S+) x \+ (\S+)", lines[-1])
    assert abs(float(last[1]) - 2) < 0.05
    assert abs(float(last[2]) + 1) < 0.05
    saved = load_file(tmp_path / "linear_model.safetensors")
    assert f"{saved['slope']:.3f}" == last[1]
    for client in clients:
        assert last[0].split(": ")[1] in client.stdout.read()
        client.stdout.close()


def test_means_across_processes(tmp_path):
    for index in range(2):
        fedlane.save(fedlane.Region.from_arrays(arrays(index)), tmp_path / f"{index}.safetensors")
    script = """
import fedlane, sys
address, index = sys.argv[1:]
region = fedlane.load(f"{index}.safetensors")
with fedlane.Client(address, name=index, examples=int(index) + 1, model=region) as client:
    for _ in client:
        client.send(region)
fedlane.save(client.model, f"mean{index}.safetensors")
"""
    with listen(clients=2) as aggregator:
        command = [sys.executable, "-c", script, aggregator.address]
        clients = [subprocess.Popen([*command, str(i)], cwd=tmp_path) for i in range(2)]
        aggregator.gather()
        model = aggregator.round()
    assert [client.wait(60) for client in clients] == [0, 0]
    assert_mean(model, [arrays(0), arrays(1)], [1, 2])
    for index in range(2):
        saved = fedlane.load(tmp_path / f"mean{index}.safetensors")
        assert bytes(memoryview(saved)) == bytes(memoryview(model))
