"""What runs on one host: several apps at once, and a pool that neither grows nor lingers."""

import os
import signal
import subprocess
import sys

import pytest
from compare import assert_through_fedlane, unpack
from conftest import finished
from harness import APPS, Deployment, wait_until
from proxy import Proxy
from test_faults import assert_mean_of_counted, counted, switches

pytest.importorskip("fedlane.flower")

ANY_MODE = pytest.mark.parametrize("mode", ["streaming", pytest.param("any", marks=pytest.mark.long)])
# No pool of another test.
OWN = {"FEDLANE_TEST_POOL": "host"}
MODEL_ELEMENTS = 2_000_000
MODEL_BYTES = 4 * MODEL_ELEMENTS


@ANY_MODE
def test_a_model_goes_to_a_host_once(flower, mode):
    """To four clients, to be evaluated and then to be trained: each of the four models is sent once."""
    with Proxy() as proxy:
        config = {"clients": 4, "rounds": 3, "evaluate": True, "elements": MODEL_ELEMENTS}
        result = finished(flower.run(APPS / "faults", switches(mode) | proxy.run_config | config, timeout_s=200))
    assert counted(result) == [[0, 1, 2, 3]] * 3
    assert_mean_of_counted(result)
    assert [each["first"] for each in result["evaluated"].values()] == [3.75, 7.5, 11.25]
    assert_through_fedlane(result)
    assert 4 * MODEL_BYTES <= proxy.downloaded < 4.2 * MODEL_BYTES
    assert 12 * MODEL_BYTES <= proxy.uploaded < 12.2 * MODEL_BYTES


@pytest.mark.parametrize("mode", ["streaming", pytest.param("any", marks=pytest.mark.long)])
def test_dtypes(flower, mode):
    """Scalars, empty, small and large arrays of f16, f64, i64 and bf16, averaged over two rounds."""
    pytest.importorskip("ml_dtypes")
    result = finished(flower.run(APPS / "faults", switches(mode) | {"clients": 4, "dtypes": True}, timeout_s=120))
    assert counted(result) == [[0, 1, 2, 3]] * 2
    assert_mean_of_counted(result)
    assert_through_fedlane(result)
    assert len(result["rest"]) == 16
    import ml_dtypes

    for name, (dtype, shape, data) in result["rest"].items():
        kind, expected_shape = name.split(maxsplit=1)
        # NumPy calls bf16 two bytes without a meaning.
        bare = dtype == "<V2"
        array = unpack({name: ["<u2" if bare else dtype, shape, data]})[name]
        array = array.view(ml_dtypes.bfloat16) if bare else array
        assert str(tuple(shape)) == expected_shape
        # Flower's own average makes f32 of bf16, and f64 of i64.
        assert mode == "any" or array.dtype.name == kind
        assert (array.astype(float) == 30).all(), name


@pytest.mark.long
def test_two_runs_of_one_superlink(flower):
    config = {"clients": 4, "elements": 300_000, "rounds": 2}
    runs = [flower.start(APPS / "faults", switches(mode) | config) for mode in ("any", "streaming")]
    for each in runs:
        assert wait_until(each.result.exists, 200), each.logs()
        result = finished(each)
        assert counted(result) == [[0, 1, 2, 3]] * 2
        assert_mean_of_counted(result)
        assert_through_fedlane(result)


@pytest.mark.long
def test_two_deployments():
    """They share the host's pool. When one ends, and kills what was its, the other goes on."""
    config = {"clients": 2, "elements": 300_000}
    with Deployment(clients=2, env=OWN) as first:
        with Deployment(clients=2, env=OWN) as second:
            runs = [each.start(APPS / "faults", switches("streaming") | config) for each in (first, second)]
            for each in runs:
                assert_mean_of_counted(finished(each.wait(200)))
            assert len(first.pools() + second.pools()) == 1
        assert_mean_of_counted(finished(first.run(APPS / "faults", switches("any") | config, timeout_s=240)))
    assert [each for each in first.leftovers if each.role == "other"] == []


@ANY_MODE
@pytest.mark.long
def test_memory_after_20_rounds(mode):
    """50 MB and two clients: after 20 rounds the ServerApp and the pool hold what they held after 4."""
    config = {"clients": 2, "elements": 12_500_000, "rounds": 20, "evaluate": True}
    with Deployment(clients=2, env=OWN) as flower:
        result = finished(flower.run(APPS / "faults", switches(mode) | config, timeout_s=900))
    assert counted(result) == [[0, 1]] * 20
    assert_mean_of_counted(result)
    levels = [each["usage"] for each in result["rounds"]]
    for role in ("server", "pool"):
        for what, slack in (("bytes", 30e6), ("files", 4)):
            held = [each[role][what] for each in levels]
            # A round may hold the updates of the one before for a while; that goes away, and does not add up.
            assert min(held[-5:]) <= max(held[1:6]) + slack, (role, what, str(held))
            assert max(held[-5:]) <= max(held[1:12]) + slack, (role, what, str(held))


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_the_pool_ends_with_its_supernodes(how):
    with Deployment(clients=2, env=OWN) as flower:
        finished(flower.run(APPS / "faults", switches("streaming") | {"clients": 2, "rounds": 1}, timeout_s=240))
        (pool,) = flower.pools()
        os.kill(flower.supernodes[0], how)
        assert not wait_until(lambda: flower.pools() != [pool], 1.5), "another SuperNode still needs it"
        os.kill(flower.supernodes[1], how)
        assert wait_until(lambda: not flower.pools(), 10)


ORPHAN = """
import os, sys, time
from fedlane.flower.host import supernode_pid
parent = os.getppid()
print(supernode_pid() == parent, flush=True)
os.write(int(sys.argv[1]), b"!")
while os.getppid() == parent:
    time.sleep(0.01)
print(supernode_pid() == os.getpid(), flush=True)
"""
PARENT = """
import os, subprocess, sys
reader, writer = os.pipe()
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(writer)], pass_fds=[writer])
os.read(reader, 1)
"""


def test_an_orphan_keeps_no_pool_alive():
    """A ClientApp whose SuperNode was killed is a child of init, which never ends: it names itself."""
    words = [sys.executable, "-c", PARENT, ORPHAN]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "True"], done
