"""Who is let in: TLS, names, secrets, and addresses that others can reach."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import fedlane
import numpy as np
import pytest
import trustme
from conftest import LONG_MS


@dataclass
class Certificates:
    """Files of an authority, a server and a client named "a"."""

    authority: Path
    server: dict[str, Path]
    client: dict[str, Path]


def certificates(directory: Path) -> Certificates:
    directory.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")

    def issue(name: str, leaf: trustme.LeafCert) -> dict[str, Path]:
        files = {"tls_cert": directory / f"{name}.pem", "tls_key": directory / f"{name}.key"}
        leaf.cert_chain_pems[0].write_to_path(files["tls_cert"])
        leaf.private_key_pem.write_to_path(files["tls_key"])
        return files

    server = issue("server", authority.issue_cert("127.0.0.1", "aggregator.example"))
    client = issue("a", authority.issue_cert(common_name="a"))
    return Certificates(directory / "ca.pem", server, client)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("made") / "certificates")


def listen(address: str = "127.0.0.1:0", **arguments) -> fedlane.Aggregator:
    return fedlane.Aggregator(address, clients=1, deadline_ms=LONG_MS, **arguments)


def region(value: float) -> fedlane.Region:
    # More than one record of TLS.
    return fedlane.Region.from_arrays({"w": np.full(100_000, value, np.float32)})


def average(server: dict, client: dict) -> float:
    """The mean that one client gets of its own update."""
    with ThreadPoolExecutor() as pool, listen(**server) as aggregator:

        def serve() -> None:
            aggregator.gather()
            aggregator.round()
            aggregator.finish()

        serving = pool.submit(serve)
        try:
            with fedlane.Client(
                aggregator.address, name="a", examples=1, model=region(3), **client
            ) as joined:
                for _ in joined:
                    joined.send()
                got = joined.model.numpy("w")
        except BaseException:
            aggregator.close()
            raise
        serving.result()
    assert (got == got[0]).all()
    return float(got[0])


def refused(server: dict, client: dict) -> str:
    with pytest.raises(fedlane.FedlaneError) as error:
        average(server, client)
    return str(error.value)


def test_a_round_with_tls(made):
    assert average(made.server, {"tls_ca": made.authority}) == 3
    as_text = {name: str(path) for name, path in made.server.items()}
    assert average(as_text, {"tls_ca": str(made.authority)}) == 3


def test_a_round_with_certificates_of_both_sides(made):
    server = made.server | {"tls_client_ca": made.authority}
    client = {"tls_ca": made.authority}
    assert average(server, client | made.client) == 3
    assert average(server | {"allow": ["b", "a"]}, client | made.client) == 3
    assert "clients need a certificate" in refused(server, client)
    assert "names that may join" in refused(server | {"allow": ["b"]}, client | made.client)


def test_the_server_must_have_a_name_and_an_authority_that_the_client_knows(made, tmp_path):
    client = {"tls_ca": made.authority}
    assert average(made.server, client | {"tls_name": "aggregator.example"}) == 3
    assert "--tls-name" in refused(made.server, client | {"tls_name": "other.example"})
    other = certificates(tmp_path / "other")
    assert "authority" in refused(made.server, {"tls_ca": other.authority})


def test_tls_on_one_side_only(made):
    assert "TLS is wanted here" in refused(made.server, {})
    assert "does not" in refused({}, {"tls_ca": made.authority})


def test_a_secret_beside_tls(made):
    secret = secrets.token_bytes(32)
    server = made.server | {"secret": secret}
    client = {"tls_ca": made.authority}
    assert average(server, client | {"secret": secret}) == 3
    assert "secret" in refused(server, client)


def test_others_must_not_reach_an_open_port(made):
    with pytest.raises(fedlane.FedlaneError, match="could join and read the models"):
        listen("0.0.0.0:0")
    for door in ({"insecure": True}, {"secret": secrets.token_bytes(32)}, made.server):
        listen("0.0.0.0:0", **door).close()


def test_files_that_belong_together(made):
    certificate, key = made.server["tls_cert"], made.server["tls_key"]
    for some in (
        {"tls_cert": certificate},
        {"tls_key": key},
        {"tls_client_ca": made.authority},
        made.server | {"allow": ["a"]},
        {"allow": ["a"]},
    ):
        with pytest.raises(ValueError, match="tls_"):
            listen(**some)
    for some in ({"tls_name": "a"}, made.client, {"tls_ca": made.authority, "tls_cert": certificate}):
        with pytest.raises(ValueError, match="tls_"):
            fedlane.Client("127.0.0.1:9", name="a", examples=1, model=region(1), **some)


def test_a_file_that_is_none_is_named(made, tmp_path):
    missing = tmp_path / "missing.pem"
    with pytest.raises(fedlane.FedlaneError, match=r"missing\.pem"):
        listen(tls_cert=missing, tls_key=made.server["tls_key"])
    with pytest.raises(fedlane.FedlaneError, match=r"missing\.pem"):
        fedlane.Client("127.0.0.1:9", name="a", examples=1, model=region(1), tls_ca=missing)
