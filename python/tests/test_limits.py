"""Rounds that go on without some, updates that are bad, and models that are too large."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import fedlane
import numpy as np
import pytest
from conftest import LONG_MS


def region(value: float) -> fedlane.Region:
    return fedlane.Region.from_arrays(
        {"w": np.full((3, 5), value, np.float32), "b": np.full((), value)}
    )


class Round:
    """A round of clients "a", "b" and "c" that send these values; "c" does what ``third`` says."""

    def __init__(self, values=(1.0, 3.0, 8.0), third=None, rounds=1, **arguments) -> None:
        arguments = {"deadline_ms": LONG_MS} | arguments
        self.told = {name: [] for name in "abc"}
        with (
            ThreadPoolExecutor() as pool,
            fedlane.Aggregator("127.0.0.1:0", clients=3, rounds=rounds, **arguments) as aggregator,
        ):
            self.aggregator = aggregator
            sends = [None, None, third]
            clients: list[Future] = [
                pool.submit(self._take_part, name, value, send)
                for name, value, send in zip("abc", values, sends, strict=True)
            ]
            self.mean = None
            self.error = None
            try:
                aggregator.gather()
                for _ in range(rounds):
                    self.mean = aggregator.round()
            except fedlane.FedlaneError as error:
                self.error = error
        self.clients = [client.exception(60) for client in clients]

    def _take_part(self, name: str, value: float, send) -> None:
        with fedlane.Client(
            self.aggregator.address, name=name, examples=1, model=region(value), deadline_ms=LONG_MS
        ) as client:
            for _ in client:
                for tensor in "wb":
                    client.model.numpy(tensor)[...] = value
                if send:
                    send(client)
                client.send()
                self.told[name].append(client.left_out)


def spoil(client: fedlane.Client) -> None:
    client.model.numpy("w")[1, 2] = np.nan
    client.model.numpy("w")[2, 4] = np.inf


@pytest.mark.parametrize("on_loss", ["redo", "spool", "auto"])
def test_all_are_counted(on_loss):
    done = Round(on_loss=on_loss)
    assert (done.mean.numpy("w") == 4.0).all()
    assert done.aggregator.counted == ["a", "b", "c"]
    assert done.aggregator.left_out == {}
    assert [update["client"] for update in done.aggregator.updates] == ["a", "b", "c"]
    assert done.aggregator.updates[1] == {
        "client": "b",
        "round": 1,
        "bytes": 68,
        "elements": 16,
        "nonfinite": 0,
        "first_nonfinite": None,
        "norm": None,
        "counted": True,
        "rejected": None,
        "clip_factor": 1.0,
        "zeroed": False,
        "weight": 1.0,
    }


@pytest.mark.parametrize("order", ["arrival", "client"])
def test_a_bad_update_is_left_out(order):
    done = Round(third=spoil, min_clients=2, order=order)
    assert (done.mean.numpy("w") == 2.0).all()
    assert done.aggregator.counted == ["a", "b"]
    assert list(done.aggregator.left_out) == ["c"]
    assert 'element 7 of tensor "w" is NaN or infinite' in done.aggregator.left_out["c"]
    bad = done.aggregator.updates[2]
    assert (bad["client"], bad["counted"], bad["rejected"]) == ("c", False, "nonfinite")
    assert (bad["nonfinite"], bad["first_nonfinite"], bad["weight"]) == (2, ("w", 7), 0.0)
    assert done.clients == [None, None, None]


@pytest.mark.parametrize("on_loss", ["redo", "spool", "auto"])
def test_a_client_with_a_bad_update_takes_part_in_the_next_round(on_loss):
    turns = iter([spoil, lambda client: None])
    done = Round(third=lambda client: next(turns)(client), min_clients=2, rounds=2, on_loss=on_loss)
    assert (done.mean.numpy("w") == 4.0).all()
    assert done.aggregator.left_out == {}
    assert done.clients == [None, None, None]
    assert done.told["a"] == done.told["b"] == [None, None]
    assert 'element 7 of tensor "w" is NaN or infinite' in done.told["c"][0]
    assert done.told["c"][1] is None


def test_a_bad_update_ends_a_session_that_needs_everyone():
    done = Round(third=spoil)
    assert isinstance(done.error, fedlane.PeerError)
    assert 'client "c"' in str(done.error)
    assert [update["client"] for update in done.aggregator.updates] == ["c"]


def test_bad_elements_are_made_zero():
    done = Round(third=spoil, on_nonfinite="zero")
    expected = np.full((3, 5), 4.0, np.float32)
    expected[1, 2] = expected[2, 4] = 4 / 3
    assert np.allclose(done.mean.numpy("w"), expected)
    assert done.aggregator.updates[2]["zeroed"] is True


def test_bad_elements_are_kept():
    done = Round(third=spoil, on_nonfinite="keep")
    assert np.isnan(done.mean.numpy("w")[1, 2])
    assert done.aggregator.counted == ["a", "b", "c"]


def test_large_updates_are_clipped():
    # Sixteen elements: norms 4, 12 and 32.
    done = Round(clip_norm=4.0)
    assert np.allclose(done.mean.numpy("w"), 1.0)
    factors = [update["clip_factor"] for update in done.aggregator.updates]
    assert np.allclose(factors, [1, 1 / 3, 1 / 8])
    assert done.aggregator.updates[2]["norm"] == pytest.approx(32.0)


def test_a_model_that_is_not_finite_is_not_sent_where_updates_are_clipped():
    bad = region(np.nan)
    with ThreadPoolExecutor() as pool:
        with fedlane.Aggregator("127.0.0.1:0", clients=1, clip_norm=1.0) as aggregator:

            def take_part() -> list[float]:
                with fedlane.Client(
                    aggregator.address, name="a", examples=1, model=region(0.0)
                ) as client:
                    for _ in client:
                        client.send()
                    return client.model.numpy("b").tolist()

            client = pool.submit(take_part)
            aggregator.gather()
            with pytest.raises(fedlane.ModelError, match='element 0 of tensor "b" of the model is NaN'):
                aggregator.send(bad)
            # Nothing was sent, and the session goes on.
            aggregator.send(region(2.0))
            aggregator.round()
        assert client.result(60) == 2.0


def test_a_round_does_not_wait_for_who_is_late():
    def oversleep(client: fedlane.Client) -> None:
        time.sleep(4)

    done = Round(third=oversleep, min_clients=2, round_deadline=1.0, reconnect=0)
    assert (done.mean.numpy("w") == 2.0).all()
    assert done.aggregator.counted == ["a", "b"]
    assert "--round-deadline" in done.aggregator.left_out["c"]


def test_a_client_that_leaves_is_left_out():
    def leave(client: fedlane.Client) -> None:
        raise RuntimeError("its data is gone")

    done = Round(third=leave, min_clients=2)
    assert (done.mean.numpy("w") == 2.0).all()
    assert "its data is gone" in done.aggregator.left_out["c"]


def test_a_first_client_with_a_model_that_is_too_large():
    with (
        ThreadPoolExecutor() as pool,
        fedlane.Aggregator("127.0.0.1:0", clients=1, max_model_bytes=67) as aggregator,
    ):
        joins = pool.submit(
            fedlane.Client, aggregator.address, name="a", examples=1, model=region(1.0)
        )
        with pytest.raises(fedlane.PeerError, match="68 bytes and at most 67 may come"):
            aggregator.gather()
        with pytest.raises(fedlane.PeerError, match="at most 67 may come"):
            joins.result(60)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"min_clients": 0}, "min clients: 0 is not between 1 and 3"),
        ({"min_clients": 4}, "min clients: 4 is not between 1 and 3"),
        ({"round_deadline": 0}, "round_deadline must be more than 0"),
        ({"round_deadline": -1.0}, "round_deadline is -1 seconds"),
        ({"round_deadline": float("nan")}, "round_deadline is NaN seconds"),
        ({"reconnect": 1e9}, "reconnect is 1000000000 seconds"),
        ({"on_loss": "weep"}, 'on_loss is "redo", "spool" or "auto", not "weep"'),
        ({"on_nonfinite": "drop"}, 'on_nonfinite is "reject", "zero" or "keep", not "drop"'),
        ({"clip_norm": 0.0}, "the clip norm is 0; it must be finite and above zero"),
        ({"clip_norm": float("inf")}, "the clip norm is inf"),
    ],
)
def test_arguments_out_of_bounds(arguments, text):
    with pytest.raises(ValueError, match=text):
        fedlane.Aggregator("127.0.0.1:0", clients=3, **arguments)
