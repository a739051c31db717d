//! Who is let in: secrets, certificates, and addresses that others can reach.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rcgen::{CertificateParams, Issuer, KeyPair};
use tempfile::TempDir;

use crate::models::{Layout, every_dtype};
use crate::process::{Process, fedlane, join, run, serve, start};
use crate::session::{average_exactly, two_members};

/// Several chunks and records for each stream.
fn large() -> Layout {
    Layout::new(&[("w", "F32", &[1_000_003]), ("h", "BF16", &[300_001])], None)
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

fn secret(directory: &Path, name: &str) -> String {
    let path = directory.join(name);
    run(fedlane("cert").arg("--secret").arg(&path)).done();
    text(&path)
}

/// Certificates that `fedlane cert` makes.
pub struct Certificates(TempDir);

impl Certificates {
    pub fn new(args: &[&str]) -> Certificates {
        let directory = tempfile::tempdir().unwrap();
        run(fedlane("cert").arg(directory.path().join("made")).args(args)).done();
        Certificates(directory)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join("made").join(file)
    }

    pub fn server(&self) -> Vec<String> {
        let (certificate, key) = (self.path("server.pem"), self.path("server.key"));
        vec!["--tls-cert".into(), text(&certificate), "--tls-key".into(), text(&key)]
    }

    fn mutual(&self) -> Vec<String> {
        [self.server(), vec!["--tls-client-ca".into(), text(&self.path("ca.pem"))]].concat()
    }

    pub fn client(&self) -> Vec<String> {
        vec!["--tls-ca".into(), text(&self.path("ca.pem"))]
    }

    fn client_as(&self, name: &str) -> Vec<String> {
        let file = |kind: &str| text(&self.path(&format!("{name}.{kind}")));
        let own = vec!["--tls-cert".into(), file("pem"), "--tls-key".into(), file("key")];
        [self.client(), own].concat()
    }
}

pub fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

/// A server that waits for one client, and what a client with these arguments is told.
fn refused(server: &[String], name: &str, client: &[String]) -> (String, Process) {
    let directory = tempfile::tempdir().unwrap();
    let members = two_members(&every_dtype(), directory.path());
    let mut server = start(serve(1), server);
    let mut command = join(&server.address(), name, &members[0].model);
    let words = run(command.args(client).arg("--deadline-ms=5000")).failed();
    (words, server)
}

fn assert_refused(server: &[String], client: &[String], told: &str, noted: &str) {
    let (words, mut server) = refused(server, "a", client);
    assert!(words.contains(told), "no {told:?} in: {words}");
    server.await_note(noted);
}

#[test]
fn a_round_with_a_secret() {
    let directory = tempfile::tempdir().unwrap();
    let secret = secret(directory.path(), "secret");
    let args = ["--secret-file", &secret];
    average_exactly(&large(), &args, &args);
}

#[test]
fn a_round_with_tls() {
    let made = Certificates::new(&[]);
    let (server, client) = (made.server(), made.client());
    average_exactly(&large(), &strs(&server), &strs(&client));
    // With what no other path is fit for, and rounds that go on.
    let server = [strs(&server), vec!["--rounds=3", "--receive-path=splice"]].concat();
    let client = [strs(&client), vec!["--send-path=sendfile"]].concat();
    average_exactly(&every_dtype(), &server, &client);
}

#[test]
fn a_round_with_certificates_of_clients_and_a_secret() {
    let made = Certificates::new(&["--client", "a", "--client", "b"]);
    let directory = tempfile::tempdir().unwrap();
    let members = two_members(&large(), directory.path());
    let shared = secret(directory.path(), "secret");
    let mean = directory.path().join("mean");
    let mut command = serve(2);
    command.args(made.mutual()).args(["--allow=a", "--allow=b", "--secret-file", &shared]);
    command.arg("--output").arg(&mean);
    let mut server = start(command, [""; 0]);
    let address = server.address();
    let clients: Vec<Process> = members
        .iter()
        .map(|member| {
            let mut join = join(&address, &member.name, &member.model);
            join.args(["--examples", &member.examples, "--secret-file", &shared]);
            start(join, made.client_as(&member.name))
        })
        .collect();
    clients.into_iter().for_each(|client| drop(client.finish().done()));
    server.finish().done();
    assert!(fs::read(mean).unwrap() == large().mean());
}

#[test]
fn a_wrong_secret_and_none() {
    let directory = tempfile::tempdir().unwrap();
    let with = |name| vec!["--secret-file".to_owned(), secret(directory.path(), name)];
    let (ours, theirs) = (with("ours"), with("theirs"));
    assert_refused(&ours, &theirs, "or it has another secret", "it has another secret, or none");
    assert_refused(&ours, &[], "give it with --secret-file", "it has another secret, or none");
    assert_refused(&[], &theirs, "or it has another secret", "it has another secret, or none");
}

#[test]
fn files_that_hold_no_secret() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("secret");
    let attempt = || run(serve(1).arg("--secret-file").arg(&path)).failed();
    assert!(attempt().contains("cannot read the secret"), "{}", attempt());
    for (content, mode, words) in [
        ("a pass phrase\n".to_owned(), 0o600, "64 hexadecimal digits"),
        ("0".repeat(64), 0o600, "64 hexadecimal digits"),
        ("ä".repeat(32), 0o600, "64 hexadecimal digits"),
        ("a".repeat(65), 0o600, "64 hexadecimal digits"),
        ("a".repeat(64), 0o640, "chmod 600"),
        ("a".repeat(64), 0o604, "chmod 600"),
    ] {
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let said = attempt();
        assert!(said.contains(words) && said.contains(&text(&path)), "{said}");
    }
}

#[test]
fn nobody_listens_to_all_by_oversight() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let words = run(fedlane("serve").args(["--clients=1", "--listen", address])).failed();
        for hint in ["--secret-file", "--tls-cert", "--insecure"] {
            assert!(words.contains(hint), "{words}");
        }
    }
    let made = Certificates::new(&[]);
    let directory = tempfile::tempdir().unwrap();
    let secret = secret(directory.path(), "secret");
    let insecure = vec!["--insecure".to_owned()];
    for args in [insecure, made.server(), vec!["--secret-file".into(), secret]] {
        let mut command = fedlane("serve");
        command.args(["--json", "--clients=1", "--listen=0.0.0.0:0"]);
        start(command, args).await_event("listening");
    }
}

#[test]
fn an_aggregator_of_another_authority() {
    let (made, other) = (Certificates::new(&[]), Certificates::new(&[]));
    assert_refused(&made.server(), &other.client(), "--tls-ca", "TLS:");
}

#[test]
fn an_aggregator_of_another_name() {
    let made = Certificates::new(&["--host", "fedlane.example"]);
    assert_refused(&made.server(), &made.client(), "--tls-name", "TLS:");
    let named = ["--tls-name".to_owned(), "fedlane.example".to_owned()];
    average_exactly(
        &every_dtype(),
        &strs(&made.server()),
        &strs(&[made.client(), named.to_vec()].concat()),
    );
}

#[test]
fn clients_without_certificate_with_another_and_under_another_name() {
    let made = Certificates::new(&["--client", "a", "--client", "b"]);
    let other = Certificates::new(&["--client", "a"]);
    let (server, plain) = (made.mutual(), made.client());
    assert_refused(&server, &plain, "clients need a certificate here", "TLS:");
    let foreign = [made.client(), other.client_as("a")[2..].to_vec()].concat();
    assert_refused(&server, &foreign, "not from the authority", "TLS:");
    let (words, mut process) = refused(&server, "a", &made.client_as("b"));
    assert!(words.contains("\"a\" is not in its certificate"), "{words}");
    process.await_note("\"a\" is not in its certificate");
    let only_b = [server, vec!["--allow=b".into()]].concat();
    let (words, mut process) = refused(&only_b, "a", &made.client_as("a"));
    assert!(words.contains("not among the names that may join"), "{words}");
    process.await_note("not among the names that may join");
}

#[test]
fn tls_on_one_side_only() {
    let made = Certificates::new(&[]);
    let hint = "give both sides TLS options, or none";
    assert_refused(&made.server(), &[], hint, "TLS is wanted here");
    assert_refused(&[], &made.client(), hint, "the peer speaks TLS and this side does not");
}

/// A client of TLS 1.2 offers no newer version.
#[test]
fn an_older_tls_is_refused() {
    let made = Certificates::new(&[]);
    let mut server = start(serve(1), made.server());
    let mut hello = vec![3, 3];
    hello.extend([7; 32]);
    // No session, one cipher suite of TLS 1.2, no compression, one kind of signature.
    hello.extend([0, 0, 2, 0xc0, 0x2f, 1, 0, 0, 8, 0, 13, 0, 4, 0, 2, 4, 3]);
    let length = hello.len() as u8;
    let record = [vec![0x16, 3, 1, 0, length + 4, 1, 0, 0, length], hello].concat();
    let mut socket = TcpStream::connect(server.address()).unwrap();
    socket.write_all(&record).unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    // A fatal alert: protocol_version.
    assert_eq!(answer, [0x15, 3, 3, 0, 2, 2, 70]);
    server.await_note("TLS:");
}

/// A certificate that was good until yesterday.
#[test]
fn a_certificate_that_has_expired() {
    let made = Certificates::new(&[]);
    let mut authority = CertificateParams::default();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    fs::write(made.path("ca.pem"), authority.self_signed(&key).unwrap().pem()).unwrap();
    let authority = Issuer::new(authority, key);
    let mut old = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    old.not_before = rcgen::date_time_ymd(2020, 1, 1);
    old.not_after = rcgen::date_time_ymd(2021, 1, 1);
    let key = KeyPair::generate().unwrap();
    fs::write(made.path("server.pem"), old.signed_by(&key, &authority).unwrap().pem()).unwrap();
    fs::write(made.path("server.key"), key.serialize_pem()).unwrap();
    assert_refused(&made.server(), &made.client(), "xpired", "TLS:");
}

#[test]
fn files_that_are_no_certificates() {
    let made = Certificates::new(&[]);
    let mut args = made.server();
    args.swap(1, 3);
    let words = run(serve(1).args(&args)).failed();
    assert!(words.contains("server.key"), "{words}");
    args[1] = text(&made.path("missing.pem"));
    let words = run(serve(1).args(&args)).failed();
    assert!(words.contains("missing.pem"), "{words}");
}

#[test]
fn cert_overwrites_nothing_and_keeps_keys_private() {
    let made = Certificates::new(&["--client", "site a"]);
    let mode = |file: &str| fs::metadata(made.path(file)).unwrap().permissions().mode() & 0o777;
    for name in ["ca", "server", "site a"] {
        assert_eq!(mode(&format!("{name}.key")), 0o600, "{name}");
        assert_eq!(mode(&format!("{name}.pem")) & 0o022, 0, "{name}");
    }
    let before = fs::read(made.path("ca.key")).unwrap();
    let words = run(fedlane("cert").arg(made.path(""))).failed();
    assert!(words.contains("exists"), "{words}");
    assert_eq!(fs::read(made.path("ca.key")).unwrap(), before);
    for name in ["../a", "", "ca", ".x"] {
        let fresh = made.path("fresh");
        run(fedlane("cert").arg(&fresh).args(["--client", name])).failed();
        assert!(!fresh.exists(), "{name}");
    }
    let secret = secret(made.0.path(), "secret");
    assert_eq!(fs::metadata(&secret).unwrap().permissions().mode() & 0o777, 0o600);
    run(fedlane("cert").args(["--secret", &secret])).failed();
}
