//! An aggregator that keeps its session on disk, and what can be wrong with that.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;

use super::host::in_namespace;
use super::hostile::Process;
use super::session::{SOON, model_file, tensor};

/// Files of a state that hold a session.
fn files(state: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(state).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
    names.retain(|name| name != "lock");
    names.sort();
    names
}

/// An aggregator that was killed when two clients had joined it; they dial for a while.
fn interrupted(state: &Path) -> (Process, Process, String) {
    let arg = format!("--state={}", state.display());
    let (serve, address) = Process::serve(&["--clients=2", &arg, "--rounds=25"]);
    let client = |name| Process::join(&address, name, &["--generate=1MiB", "--reconnect-ms=2000"]);
    let (first, second) = (client("first"), client("second"));
    // They have a plan, and the session is on the disk.
    first.await_line("upload:");
    second.await_line("upload:");
    serve.signal(Signal::KILL);
    serve.end(SOON);
    (first, second, address)
}

fn again(state: &Path, address: &str, more: &[&str]) -> Process {
    let state = format!("--state={}", state.display());
    let args = ["serve", "--listen", address, &state];
    Process::start(&[&args[..], more].concat())
}

#[test]
fn a_session_that_ends_leaves_nothing() {
    let state = tempfile::tempdir().unwrap();
    let arg = format!("--state={}", state.path().display());
    let (serve, address) = Process::serve(&["--clients=1", &arg, "--rounds=2"]);
    let client = Process::join(&address, "a", &["--generate=1MiB"]);
    serve.succeeds(SOON);
    client.succeeds(SOON);
    assert_eq!(files(state.path()), [""; 0]);
}

#[test]
fn a_session_of_many_rounds_goes_on() {
    let state = tempfile::tempdir().unwrap();
    let (first, second, address) = interrupted(state.path());
    for _ in 0..4 {
        let serve = again(state.path(), &address, &["--clients=2", "--rounds=25"]);
        serve.await_word("going on with the session");
        serve.await_line("the mean of 2 clients");
        serve.signal(Signal::KILL);
        serve.end(SOON);
    }
    let serve = again(state.path(), &address, &["--clients=2", "--rounds=25"]);
    serve.succeeds(SOON);
    first.succeeds(SOON);
    second.succeeds(SOON);
    assert_eq!(files(state.path()), [""; 0]);
}

/// Ones, in a file for `--initial` and `--model`.
fn ones(directory: &Path) -> String {
    let header = format!("{{{}}}", tensor("t", "F32", "[256]", 0, 1024));
    let mut file = model_file(&header, 0);
    file.extend(1_f32.to_le_bytes().repeat(256));
    let path = directory.join("ones.safetensors");
    std::fs::write(&path, file).unwrap();
    path.display().to_string()
}

#[test]
fn updates_are_measured_from_the_same_model() {
    let directory = tempfile::tempdir().unwrap();
    let (state, model) = (directory.path().join("state"), ones(directory.path()));
    let more = ["--clients=1", "--initial", &model, "--clip-norm=1"];
    let arg = format!("--state={}", state.display());
    let (serve, address) = Process::serve(&[&more[..], &[&arg]].concat());
    let join = |name: &str| {
        let args = ["join", &address, "--name", name, "--model", &model, "--reconnect-ms=5000"];
        Process::start(&args)
    };
    let client = join("a");
    // The round cannot end before the client has the initial model, nor the session before it is over.
    client.await_line("download:");
    serve.signal(Signal::KILL);
    serve.end(SOON);
    let serve = again(&state, &address, &more);
    let update = serve.await_line("update of \"a\"");
    assert!(update.contains("norm 0.0"), "{update}");
    serve.succeeds(SOON);
    client.succeeds(SOON);
}

#[test]
fn a_session_that_lost_a_client_goes_on_when_it_comes() {
    let state = tempfile::tempdir().unwrap();
    let arg = format!("--state={}", state.path().display());
    let args = ["--clients=2", &arg, "--reconnect-ms=200", "--deadline-ms=2000"];
    let (serve, address) = Process::serve(&args);
    let join = |name: &str, more: &[&str]| {
        let usual = ["--deadline-ms=2000"];
        Process::join(&address, name, &[&usual[..], more].concat())
    };
    let large = ["--generate=64MiB"];
    let (first, second) = (join("first", &large), join("second", &large));
    serve.await_line("prepare:");
    second.signal(Signal::KILL);
    serve.fails(SOON, &["client \"second\"", "the session is kept in"]);
    first.fails(SOON, &["client \"second\""]);
    let serve = again(state.path(), &address, &["--clients=2", "--deadline-ms=2000"]);
    serve.await_line("listening on ");
    let (first, second) = (join("first", &large), join("second", &large));
    serve.succeeds(SOON);
    first.succeeds(SOON);
    second.succeeds(SOON);
}

#[test]
fn a_session_that_began_with_few_goes_on() {
    let state = tempfile::tempdir().unwrap();
    let arg = format!("--state={}", state.path().display());
    let few = ["--clients=3", "--min-clients=2", "--round-deadline=0.5", "--on-loss=spool"];
    let (serve, address) = Process::serve(&[&few[..], &[&arg, "--rounds=8"]].concat());
    let join = |name| Process::join(&address, name, &["--generate=1MiB", "--reconnect-ms=5000"]);
    let (first, second) = (join("first"), join("second"));
    first.await_line("upload:");
    serve.signal(Signal::KILL);
    serve.end(SOON);
    let serve = again(state.path(), &address, &[&few[..], &["--rounds=8"]].concat());
    serve.succeeds(SOON);
    first.succeeds(SOON);
    second.succeeds(SOON);
}

#[test]
fn what_is_not_ours_stays() {
    let state = tempfile::tempdir().unwrap();
    let path = state.path().join("region-europe.csv");
    std::fs::write(&path, "north").unwrap();
    let arg = format!("--state={}", state.path().display());
    let serve = Process::start(&["serve", "--listen=127.0.0.1:0", "--clients=1", &arg]);
    serve.fails(SOON, &["is not empty and holds no session"]);
    assert_eq!(std::fs::read_to_string(path).unwrap(), "north");
}

#[test]
fn a_session_of_other_options() {
    let state = tempfile::tempdir().unwrap();
    let (_first, _second, address) = interrupted(state.path());
    let serve = again(state.path(), &address, &["--clients=2", "--rounds=7"]);
    serve.fails(SOON, &["--rounds 25, not 7", "remove the directory"]);
}

#[test]
fn a_client_of_a_session_that_is_not_kept() {
    let state = tempfile::tempdir().unwrap();
    let (first, second, address) = interrupted(state.path());
    let other = tempfile::tempdir().unwrap();
    let _serve = again(other.path(), &address, &["--clients=2"]);
    first.fails(SOON, &["has begun a new session", "start the client again"]);
    second.fails(SOON, &["has begun a new session"]);
}

#[test]
fn a_damaged_record() {
    let state = tempfile::tempdir().unwrap();
    let (_first, _second, address) = interrupted(state.path());
    let path = state.path().join("session");
    let mut record = std::fs::read(&path).unwrap();
    let last = record.len() - 1;
    record[last] ^= 1;
    std::fs::write(&path, record).unwrap();
    let serve = again(state.path(), &address, &["--clients=2", "--rounds=25"]);
    serve.fails(SOON, &["does not match its checksum", "remove the directory"]);
}

#[test]
fn two_aggregators_with_one_state() {
    let state = tempfile::tempdir().unwrap();
    let arg = format!("--state={}", state.path().display());
    let (_serve, _) = Process::serve(&["--clients=1", &arg]);
    let other = Process::start(&["serve", "--listen=127.0.0.1:0", "--clients=1", &arg]);
    other.fails(SOON, &["another aggregator keeps its state", "--state"]);
}

#[test]
fn a_state_that_is_no_directory() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let arg = format!("--state={}", file.path().display());
    let serve = Process::start(&["serve", "--listen=127.0.0.1:0", "--clients=1", &arg]);
    serve.fails(SOON, &["cannot make", &file.path().display().to_string()]);
}

#[test]
fn a_disk_without_room_for_the_state() {
    let state = tempfile::tempdir().unwrap();
    let script = r#"mount -t tmpfs -o size=4m none "$1"
        "$0" serve --listen=127.0.0.1:0 --clients=1 --deadline-ms=600 --state="$1" | {
            read -r line; address=${line#listening on }; address=${address%%,*}
            "$0" join "$address" --name=a --generate=16MiB --deadline-ms=600 || true
        } 2>&1
        ls "$1""#;
    let path = state.path().to_str().unwrap();
    let Some(shell) = in_namespace(script, &[path]) else { return };
    let (_, said) = shell.end(SOON);
    assert!(said.contains("the disk of") && said.contains("leaves 4 MiB"), "{said}");
    assert!(!said.contains("region-1\n"), "half a region stayed:\n{said}");
}

/// Two clients, three rounds, and a small disk at `$1` that is filled while a client trains for the second
/// one. When there is room again, the same commands go on. `$2` is the model, `$3` how the session is kept.
const FILLED: &str = r#"
    disk=$1; model=$2; options=$3; address=127.0.0.1:0
    mount -t tmpfs -o size=16m none "$disk"
    session() {
        : >"$model.out"
        "$0" serve --listen=$address --clients=2 --rounds=3 $options >>"$model.out" 2>&1 & server=$!
        until grep -q 'listening on' "$model.out"; do sleep 0.02; done
        address=$(sed -n 's/listening on \([^,]*\),.*/\1/p' "$model.out")
        "$0" join $address --name=a --model="$model" --train "$train" &
        "$0" join $address --name=b --model="$model" &
        status=0; wait $server || status=$?
        wait; cat "$model.out" >&2
    }
    train="test \$FEDLANE_ROUND != 2 || head -c 99000000 /dev/zero >$disk/fill || true"
    session; test $status = 1 || exit 9
    test ! -e "$disk/state/session.next" || exit 8
    rm "$disk/fill"; train=true
    session; test $status = 0 || exit 7
    ls "$disk" "$disk/state" "$model.state" 2>/dev/null | grep -e session -e region && exit 6
    cmp "$model" "$model.mean" || cmp "$model" "$disk/mean"
"#;

fn filled(options: impl Fn(&str, &str) -> String, words: &[&str]) {
    let (directory, disk) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let header = format!("{{{}}}", tensor("w", "F32", "[500000]", 0, 2_000_000));
    let mut file = model_file(&header, 0);
    (0..500_000_u32).for_each(|index| file.extend((index as f32).to_le_bytes()));
    let model = directory.path().join("model");
    std::fs::write(&model, file).unwrap();
    let (disk, model) = (disk.path().to_str().unwrap(), model.to_str().unwrap());
    let Some(shell) = in_namespace(FILLED, &[disk, model, &options(disk, model)]) else { return };
    let (status, said) = shell.end(Duration::from_secs(60));
    assert!(status.success(), "{status}: {said}");
    let kept = ["the session is kept in", "start the same command again"];
    words
        .iter()
        .chain(&kept)
        .for_each(|word| assert!(said.contains(word), "no {word:?} in:\n{said}"));
}

#[test]
fn a_disk_that_is_filled_under_a_session_that_is_kept_there() {
    for on_loss in ["redo", "spool"] {
        let options = |disk: &str, model: &str| {
            format!("--state={disk}/state --output={model}.mean --on-loss={on_loss}")
        };
        filled(options, &["cannot write", "/state/session", "No space left on device"]);
    }
}

#[test]
fn a_disk_that_is_filled_under_the_output_of_a_session_that_is_kept() {
    let options = |disk: &str, model: &str| format!("--state={model}.state --output={disk}/mean");
    filled(options, &["no room for", "/mean"]);
}
