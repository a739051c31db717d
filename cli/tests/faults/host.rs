//! Hosts that lack a port, memory, descriptors or a disk.

use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::hostile::{Process, command};
use super::session::{SOON, assert_empty, model_file, tensor};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Runs a script with the program as `$0`, in a mount namespace of its own where that is allowed.
pub fn in_namespace(script: &str, arguments: &[&str]) -> Option<Process> {
    let try_it = || std::process::Command::new("unshare").args(["-m", "true"]).output();
    if !is_root() || !try_it().is_ok_and(|done| done.status.success()) {
        eprintln!("skipped: a mount namespace takes root and the right to mount");
        return None;
    }
    let mut unshare = std::process::Command::new("unshare");
    unshare.args(["-m", "sh", "-ec", script, env!("CARGO_BIN_EXE_fedlane")]).args(arguments);
    Some(Process::spawn(&mut unshare))
}

/// Runs the program under a limit that `ulimit` sets.
pub fn limited(limit: &str, arguments: &[&str]) -> Process {
    let script = format!("ulimit {limit} && exec \"$0\" \"$@\"");
    let mut shell = std::process::Command::new("sh");
    Process::spawn(shell.args(["-c", &script, env!("CARGO_BIN_EXE_fedlane")]).args(arguments))
}

#[test]
fn a_port_in_use() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serve = Process::start(&["serve", "--clients=1", "--listen", &address]);
    serve.fails(SOON, &["cannot listen on", &address, "--listen"]);
}

#[test]
fn an_address_to_listen_on_that_is_none() {
    for address in ["nonsense", "256.1.1.1:80", "127.0.0.1:99999", "192.0.2.1:7733"] {
        let serve = Process::start(&["serve", "--clients=1", "--listen", address]);
        serve.fails(Duration::from_secs(30), &["cannot listen on", address]);
    }
}

#[test]
fn a_model_that_no_memory_holds() {
    let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=600"]);
    let client = Process::join(&address, "a", &["--generate", "1000GiB"]);
    serve.fails(SOON, &["cannot be made", "leaves"]);
    client.fails(SOON, &[&address, "cannot be made"]);
}

#[test]
fn too_few_open_files_for_the_aggregator() {
    let serve = limited("-n 20", &["serve", "--listen=127.0.0.1:0", "--clients=40"]);
    serve.fails(SOON, &["open files", "ulimit -n"]);
}

#[test]
fn too_few_open_files_for_a_client() {
    let (serve, address) = Process::serve(&["--clients=1", "--streams=40", "--deadline-ms=600"]);
    let args = ["join", &address, "--name=a", "--generate=64MiB"];
    let client = limited("-n 20", &args);
    client.fails(SOON, &["Too many open files"]);
    serve.fails(SOON, &["client \"a\" (127.0.0.1:"]);
}

#[test]
fn too_little_address_space() {
    // From too little for a few threads to enough for everything.
    for kib in (24_000..70_000).step_by(4_000) {
        let args = ["serve", "--listen=127.0.0.1:0", "--clients=1", "--deadline-ms=600"];
        let serve = limited(&format!("-v {kib}"), &args);
        if let Some(line) = serve.try_line("listening on ") {
            let address = line.split([' ', ',']).nth(2).unwrap();
            let client = Process::join(address, "a", &["--generate=16MiB", "--deadline-ms=600"]);
            let (status, said) = client.end(SOON);
            assert!(matches!(status.code(), Some(0 | 1)), "{kib} KiB: {status}:\n{said}");
            if serve.has_said("could not be served") {
                // It has no thread for a visitor, and waits for the next one.
                serve.signal(Signal::TERM);
            }
        }
        let (status, said) = serve.end(SOON);
        let stopped = status.signal() == Some(Signal::TERM.as_raw());
        // A small piece of memory that cannot be had ends any program of the standard library.
        let stopped = stopped || said.contains("memory allocation of");
        assert!(stopped || matches!(status.code(), Some(0 | 1)), "{kib} KiB: {status}:\n{said}");
        assert!(!said.contains("panicked"), "{kib} KiB: {said}");
    }
}

#[test]
fn too_little_address_space_for_a_client() {
    for kib in (16_000..62_000).step_by(6_000) {
        let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=600"]);
        let args = ["join", &address, "--name=a", "--generate=16MiB", "--deadline-ms=600"];
        let (status, said) = limited(&format!("-v {kib}"), &args).end(SOON);
        let stopped = said.contains("memory allocation of") || said.contains("error while loading");
        assert!(stopped || matches!(status.code(), Some(0 | 1)), "{kib} KiB: {status}:\n{said}");
        assert!(!said.contains("panicked"), "{kib} KiB: {said}");
        if stopped || !status.success() {
            // One that never joined leaves it waiting for another.
            if serve.has_said("client \"a\"") {
                serve.fails(SOON, &["client \"a\" (127.0.0.1:"]);
            }
        } else {
            serve.succeeds(SOON);
        }
    }
}

/// As `ulimit -f` counts: in blocks of 512 bytes.
const A_MIB_OF_FILE: &str = "-f 2048";

#[test]
fn files_that_may_not_grow_at_the_aggregator() {
    // Regions are files too; they are made when the first client has come.
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("mean");
    let output = format!("--output={}", output.display());
    let args = ["serve", "--listen=127.0.0.1:0", "--clients=1", "--deadline-ms=600", &output];
    let serve = limited(A_MIB_OF_FILE, &args);
    let line = serve.await_line("listening on ");
    let address = line.split([' ', ',']).nth(2).unwrap();
    let client = Process::join(address, "a", &["--generate=4MiB"]);
    serve.fails(SOON, &["a region of 4", "File too large"]);
    client.fails(SOON, &[address, "File too large"]);
    assert_empty(directory.path());
}

#[test]
fn files_that_may_not_grow_at_a_client() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("mean");
    let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=600"]);
    let path = format!("--output={}", output.display());
    let args = ["join", &address, "--name=a", "--generate=4MiB", &path];
    let client = limited(A_MIB_OF_FILE, &args);
    client.fails(SOON, &["no room for", output.to_str().unwrap(), "bytes"]);
    serve.fails(SOON, &["client \"a\" (127.0.0.1:", "no room for"]);
    assert_empty(directory.path());
}

#[test]
fn memory_that_may_not_be_locked_does_not_matter() {
    limited("-l 0", &["demo", "--generate=8MiB", "--clients=2"]).succeeds(Duration::from_secs(30));
}

/// A session runs to its end with this done to /dev/shm before.
fn without_shared_memory(how: &str) {
    let script = format!("{how}; exec \"$0\" demo --generate=8MiB --clients=2");
    if let Some(demo) = in_namespace(&script, &[]) {
        demo.succeeds(Duration::from_secs(30));
    }
}

#[test]
fn a_tiny_dev_shm_does_not_matter() {
    without_shared_memory("mount -t tmpfs -o size=64k none /dev/shm");
}

#[test]
fn a_dev_shm_smaller_than_the_models_does_not_matter() {
    let script = "mount -t tmpfs -o size=64m none /dev/shm
        \"$0\" demo --generate=80MiB --clients=2; test -z \"$(ls -A /dev/shm)\"";
    if let Some(demo) = in_namespace(script, &[]) {
        demo.succeeds(Duration::from_secs(60));
    }
}

#[test]
fn an_absent_dev_shm_does_not_matter() {
    without_shared_memory("mount -t tmpfs none /dev; mknod -m 666 /dev/null c 1 3");
}

#[test]
fn a_full_disk_shows_before_anything_is_sent() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().to_str().unwrap();
    let script = "mount -t tmpfs -o size=1m none \"$1\"; cd \"$1\"; status=0
        \"$0\" serve --listen=127.0.0.1:0 --clients=1 --deadline-ms=600 --output=mean || status=$?
        test -z \"$(ls -A)\" || status=9; exit $status";
    let Some(serve) = in_namespace(script, &[disk]) else { return };
    let line = serve.await_line("listening on ");
    let address = line.split([' ', ',']).nth(2).unwrap();
    let client = Process::join(address, "a", &["--generate", "4MiB"]);
    serve.fails(SOON, &["no room for mean", "bytes"]);
    client.fails(SOON, &[address, "no room for mean"]);
}

#[test]
fn a_full_disk_of_a_client() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().to_str().unwrap();
    let script = "mount -t tmpfs -o size=1m none \"$1\"; cd \"$1\"; status=0
        \"$0\" join \"$2\" --name=a --generate=4MiB --output=mean || status=$?
        test -z \"$(ls -A)\" || status=9; exit $status";
    let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=600"]);
    let Some(client) = in_namespace(script, &[disk, &address]) else { return };
    client.fails(SOON, &["no room for mean", "bytes"]);
    serve.fails(SOON, &["client \"a\" (127.0.0.1:", "no room for mean"]);
}

#[test]
fn outputs_that_cannot_be_written() {
    for output in ["/proc/mean", "/nowhere/mean", "/dev/null", "/", "/tmp/"] {
        let args = ["serve", "--listen=127.0.0.1:0", "--clients=1", "--output", output];
        Process::start(&args).fails(SOON, &[output]);
        let args = ["--generate=1KiB", "--output", output];
        Process::join("127.0.0.1:1", "a", &args).fails(SOON, &[output]);
    }
}

#[test]
fn a_read_only_directory() {
    let directory = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o ro,size=1m none \"$1\"
        exec \"$0\" serve --listen=127.0.0.1:0 --clients=1 --output=\"$1/mean\"";
    let path = directory.path().to_str().unwrap();
    let Some(serve) = in_namespace(script, &[path]) else { return };
    serve.fails(SOON, &[path, "Read-only"]);
}

#[test]
fn a_read_only_directory_of_a_client() {
    let directory = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o ro,size=1m none \"$1\"
        exec \"$0\" join 127.0.0.1:1 --name=a --generate=1KiB --output=\"$1/mean\"";
    let path = directory.path().to_str().unwrap();
    let Some(client) = in_namespace(script, &[path]) else { return };
    client.fails(SOON, &[path, "Read-only"]);
}

#[test]
fn a_disk_that_is_filled_by_others_in_the_middle_of_a_session() {
    // There is room when the session begins, and none when the mean is written: another process
    // takes it while the client trains. The file of the round before stays whole.
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().to_str().unwrap();
    let script = "mount -t tmpfs -o size=8m none \"$1\"; cd \"$1\"; status=0
        \"$0\" serve --listen=127.0.0.1:0 --clients=1 --rounds=2 --output=mean >\"$2.out\" & server=$!
        until grep -q listening \"$2.out\"; do sleep 0.02; done
        address=$(sed -n 's/listening on \\([^,]*\\),.*/\\1/p' \"$2.out\")
        \"$0\" join \"$address\" --name=a --model=\"$2\" \
            --train 'test $FEDLANE_ROUND = 1 || head -c 9000000 /dev/zero >fill || true' || status=$?
        wait $server && exit 8; rm fill \"$2.out\"
        test \"$(ls -A)\" = mean || exit 9
        cmp -s mean \"$2\" || exit 7; exit $status";
    let model = tempfile::NamedTempFile::new().unwrap();
    let header = format!("{{{}}}", tensor("w", "F32", "[500000]", 0, 2_000_000));
    std::fs::write(model.path(), model_file(&header, 2_000_000)).unwrap();
    let model = model.path().to_str().unwrap();
    let Some(both) = in_namespace(script, &[disk, model]) else { return };
    both.fails(Duration::from_secs(30), &["no room for mean"]);
}

#[test]
fn outputs_that_nobody_reads() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let mut children = Vec::new();
    for args in [
        vec!["serve", "--listen", &address, "--clients=2"],
        vec!["join", &address, "--name=a", "--generate=1MiB"],
        vec!["join", &address, "--name=b", "--generate=1MiB"],
    ] {
        let mut child =
            command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        children.push(child);
        let until = Instant::now() + SOON;
        // A stranger makes it warn; and says when it listens.
        while children.len() == 1 && TcpStream::connect(&address).is_err() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_memory_cgroup_that_is_too_small() {
    let Some(group) = Cgroup::new(96 << 20) else { return };
    let script = "echo $$ > \"$1\"; exec \"$0\" serve --listen=127.0.0.1:0 --clients=1";
    let mut shell = std::process::Command::new("sh");
    shell.args(["-ec", script, env!("CARGO_BIN_EXE_fedlane")]).arg(group.0.join("cgroup.procs"));
    let serve = Process::spawn(&mut shell);
    let line = serve.await_line("listening on ");
    let address = line.split([' ', ',']).nth(2).unwrap();
    let client = Process::join(address, "a", &["--generate", "256MiB"]);
    serve.fails(SOON, &["cannot be made", "the cgroup limit in "]);
    client.fails(SOON, &[address, "the cgroup limit in "]);
}

/// A memory cgroup, removed in the end.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(limit_bytes: u64) -> Option<Cgroup> {
        let name = format!("fedlane-test-{}", std::process::id());
        for (root, file) in [("memory", "memory.limit_in_bytes"), ("", "memory.max")] {
            let directory = Path::new("/sys/fs/cgroup").join(root).join(&name);
            if std::fs::create_dir(&directory).is_ok() {
                let group = Cgroup(directory);
                if std::fs::write(group.0.join(file), limit_bytes.to_string()).is_ok() {
                    return Some(group);
                }
            }
        }
        eprintln!("skipped: no memory cgroup can be made here");
        None
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Where a process is still ending in it, it stays, empty.
        let _ = std::fs::remove_dir(&self.0);
    }
}
