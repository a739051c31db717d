"""fedlane.Ring: every host has the same mean, and hears of those that are lost."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import trustme

import fedlane

SECONDS = 60


def region(value, elements=100_003):
    rising = np.arange(elements, dtype=np.float32) % 1021
    with np.errstate(invalid="ignore"):  # Nothing times infinity.
        scaled = rising * value
    return fedlane.Region.from_arrays({"w": scaled, "b": np.array([value], np.float64)})


def ring_of(values, weights, steps=1, min_ranks=None, leaves=(), **options):
    """Runs a ring with a thread for each host; what each has, or the error that ended it. After all
    steps some leave, and the others take one more."""
    first = fedlane.Ring(
        "127.0.0.1:0",
        name="host-0",
        model=region(values[0]),
        ranks=len(values),
        min_ranks=min_ranks,
        deadline_ms=20_000,
        **options,
    )
    results = [None] * len(values)

    def host(rank):
        name, model = f"host-{rank}", region(values[rank])
        try:
            with first if rank == 0 else fedlane.Ring(first.address, name=name, model=model) as ring:
                means = [ring.all_reduce(model, weights[rank]) for _ in range(steps)]
                if rank in leaves:
                    return
                if leaves:
                    means.append(ring.all_reduce(model, weights[rank]))
                results[rank] = (means[-1], ring.members)
                done.wait(SECONDS)
        except fedlane.FedlaneError as error:
            results[rank] = error

    done = threading.Barrier(len(values) - len(leaves))
    threads = [threading.Thread(target=host, args=(rank,)) for rank in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("topology", ["ring", "chain"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_all_have_the_weighted_mean(ranks, topology):
    values, weights = [1.0 + rank for rank in range(ranks)], [2.0**rank for rank in range(ranks)]
    results = ring_of(values, weights, steps=3, topology=topology)
    expected = np.average(values, weights=weights)
    first = results[0][0].numpy("w").copy()
    for mean, members in results:
        assert np.array_equal(mean.numpy("w"), first)
        rising = np.arange(first.size, dtype=np.float32) % 1021
        np.testing.assert_allclose(mean.numpy("w"), rising * expected, rtol=1e-6)
        np.testing.assert_allclose(mean.numpy("b"), expected)
        assert members == {f"host-{rank}": weights[rank] for rank in range(ranks)}


def test_the_source_is_not_changed_and_the_mean_can_be():
    results = ring_of([1.0, 3.0], [1.0, 1.0])
    mean = results[0][0]
    assert mean.numpy("b")[0] == 2.0
    mean.numpy("b")[0] = 7.0
    assert results[1][0].numpy("b")[0] == 2.0


def test_the_others_go_on_without_a_host_that_leaves():
    results = ring_of([1.0, 2.0, 6.0], [1.0, 1.0, 1.0], min_ranks=2, leaves=[1])
    assert [result[0].numpy("b")[0] for result in (results[0], results[2])] == [3.5, 3.5]


def test_all_hear_of_a_host_that_leaves():
    results = ring_of([1.0, 2.0, 6.0], [1.0, 1.0, 1.0], leaves=[1])
    errors = [results[0], results[2]]
    assert all(isinstance(error, fedlane.PeerError) for error in errors), errors
    assert all("host-1" in str(error) for error in errors)


@pytest.mark.parametrize("topology", ["ring", "chain"])
def test_a_model_that_is_not_finite_is_left_out_or_not(topology):
    values, weights = [1.0, np.inf, 6.0], [1.0, 1.0, 1.0]

    def means(**options):
        results = ring_of(values, weights, topology=topology, **options)
        return [mean.numpy("b")[0] for mean, _ in results]

    assert means(min_ranks=2) == [3.5] * 3
    assert means(on_nonfinite="zero") == pytest.approx([7.0 / 3] * 3)
    assert means(on_nonfinite="keep") == [np.inf] * 3
    errors = ring_of(values, weights, topology=topology)
    assert all("host-1" in str(error) for error in errors), errors


def test_hosts_speak_tls(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    leaf = authority.issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "ring.pem")
    leaf.private_key_pem.write_to_path(tmp_path / "ring.key")
    own = {"tls_cert": tmp_path / "ring.pem", "tls_key": tmp_path / "ring.key"}
    trust = {"tls_ca": tmp_path / "ca.pem"}
    model = region(1.0)
    with pytest.raises(ValueError, match="tls_ca"):
        fedlane.Ring("127.0.0.1:0", name="a", model=model, ranks=2, **own)
    with fedlane.Ring("127.0.0.1:0", name="a", model=model, ranks=2, **own, **trust) as first:
        with pytest.raises(fedlane.PeerError, match="TLS"):
            fedlane.Ring(first.address, name="b", model=model)
        with (
            ThreadPoolExecutor() as pool,
            fedlane.Ring(first.address, name="b", model=model, **trust) as second,
        ):
            other = pool.submit(second.all_reduce, region(3.0))
            mean = first.all_reduce(model)
            assert mean.numpy("b")[0] == other.result(SECONDS).numpy("b")[0] == 2.0


def test_wrong_use():
    model = region(1.0)
    for option in [dict(topology="star"), dict(on_nonfinite="drop")]:
        with pytest.raises(ValueError, match=next(iter(option))):
            fedlane.Ring("127.0.0.1:0", name="a", model=model, ranks=2, **option)
    with pytest.raises(ValueError, match="for the host that gives"):
        fedlane.Ring("127.0.0.1:1", name="a", model=model, topology="chain")
    with pytest.raises(ValueError, match="ranks"):
        fedlane.Ring("127.0.0.1:1", name="a", model=model, min_ranks=2)
    with pytest.raises(ValueError, match="hosts of a ring"):
        fedlane.Ring("127.0.0.1:0", name="a", model=model, ranks=1)
    with fedlane.Ring("127.0.0.1:0", name="a", model=model, ranks=2) as ring:
        with pytest.raises(ValueError, match="weight"):
            ring.all_reduce(model, -1.0)
        with pytest.raises(fedlane.ModelError):
            ring.all_reduce(region(1.0, elements=5))
        assert ring.members == {}
    with pytest.raises(fedlane.FedlaneError, match="closed"):
        ring.all_reduce(model)
    ring.close()


def test_ctrl_c_ends_an_all_reduce():
    script = """
import fedlane
region = fedlane.Region({"w": ("float32", (1000,))})
with fedlane.Ring("127.0.0.1:0", name="a", model=region, ranks=2, deadline_ms=600_000) as ring:
    print("ready", flush=True)
    ring.all_reduce(region)
"""
    # Who runs these tests may ignore it, and so would the child.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in errors, errors
