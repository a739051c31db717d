//! Two hundred rounds leave memory, descriptors, threads and files where they were.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROUNDS: u32 = 200;

/// When everything that stays is there.
const WARM_ROUND: u32 = 20;

/// Memory that an allocator may keep between two looks.
const SLACK_KIB: u64 = 2 << 10;

const PATIENCE: Duration = Duration::from_secs(120);

/// What a process holds.
#[derive(Debug)]
struct Holdings {
    descriptors: u64,
    threads: u64,
    resident_kib: u64,
}

/// Run in every round before the update is sent, when nothing else moves: looks at both processes.
const LOOK: &str = r#"
case $FEDLANE_ROUND in 20|200) ;; *) exit 0 ;; esac
look() {
    ls /proc/$1/fd | wc -l
    ls /proc/$1/task | wc -l
    sed -n 's/^VmRSS:[^0-9]*\([0-9]*\) kB/\1/p' /proc/$1/status
}
look $PPID >"$LOOKS/join.$FEDLANE_ROUND"
look $SERVE >"$LOOKS/serve.$FEDLANE_ROUND"
"#;

fn start(args: &[&str], log: &Path, environment: &[(&str, &str)]) -> Child {
    let log = std::fs::File::create(log).unwrap();
    Command::new(env!("CARGO_BIN_EXE_fedlane"))
        .args(args)
        .envs(environment.iter().copied())
        .env("FEDLANE_END_WITH_PARENT", "1")
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap()
}

/// Waits until it has ended well.
fn succeeds(mut child: Child, log: &Path) {
    let until = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > until => {
                child.kill().unwrap();
                break child.wait().unwrap();
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(status.success(), "{status}\n{}", std::fs::read_to_string(log).unwrap());
}

fn await_address(log: &Path) -> String {
    let until = Instant::now() + PATIENCE;
    loop {
        let said = std::fs::read_to_string(log).unwrap();
        if let Some((_, rest)) = said.split_once("listening on ")
            && let Some((address, _)) = rest.split_once(',')
        {
            return address.into();
        }
        assert!(Instant::now() < until, "{said}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A model of a few tensors of f32.
fn write_model(path: &Path) {
    let header = r#"{"w":{"dtype":"F32","shape":[3000],"data_offsets":[0,12000]}}"#;
    let data: Vec<u8> = (0..3000).flat_map(|index| (index as f32).to_le_bytes()).collect();
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length[..], header.as_bytes(), &data].concat()).unwrap();
}

fn look(directory: &Path, who: &str, round: u32) -> Holdings {
    let text = std::fs::read_to_string(directory.join(format!("{who}.{round}"))).unwrap();
    let numbers: Vec<u64> = text.lines().map(|line| line.trim().parse().unwrap()).collect();
    let [descriptors, threads, resident_kib] = numbers[..] else { panic!("{text}") };
    Holdings { descriptors, threads, resident_kib }
}

#[test]
fn two_hundred_rounds_leave_everything_where_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let (looks, outputs) = (directory.path().join("looks"), directory.path().join("outputs"));
    [&looks, &outputs].into_iter().for_each(|path| std::fs::create_dir(path).unwrap());
    let path = |name: &str| directory.path().join(name);
    let text = |path: &Path| path.to_str().unwrap().to_string();
    let (model, serve_log, join_log) = (path("model"), path("serve.log"), path("join.log"));
    write_model(&model);
    let rounds = format!("--rounds={ROUNDS}");
    let mean = format!("--output={}", text(&outputs.join("mean")));
    let args = ["serve", "--listen=127.0.0.1:0", "--clients=2", "--streams=2", &rounds, &mean];
    let serve = start(&args, &serve_log, &[]);
    let address = await_address(&serve_log);
    let model = format!("--model={}", text(&model));
    let other = start(&["join", &address, "--name=other", &model], &path("other.log"), &[]);
    let mean = format!("--output={}", text(&outputs.join("mine")));
    let args = ["join", &address, "--name=looks", &model, "--train", LOOK, &mean];
    let environment = [("SERVE", serve.id().to_string()), ("LOOKS", text(&looks))];
    let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
    let client = start(&args, &join_log, &environment);
    succeeds(serve, &serve_log);
    succeeds(client, &join_log);
    succeeds(other, &path("other.log"));
    for who in ["serve", "join"] {
        let (before, after) = (look(&looks, who, WARM_ROUND), look(&looks, who, ROUNDS));
        println!("{who}: {before:?}, {after:?}");
        assert_eq!(after.descriptors, before.descriptors, "{who}: descriptors");
        assert_eq!(after.threads, before.threads, "{who}: threads");
        let grown = after.resident_kib.saturating_sub(before.resident_kib);
        assert!(grown < SLACK_KIB, "{who}: {grown} KiB more are resident");
    }
    let mut left: Vec<_> = outputs.read_dir().unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["mean", "mine"]);
}
