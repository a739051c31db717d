//! The command line itself: help, completions, usage errors.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use crate::process::{fedlane, run};

/// Flags for the program's own use and for benchmarks, which help does not mention.
const HIDDEN: [&str; 4] = ["--averaging", "--scale-exponent", "--stage", "--expect"];
const COMMANDS: [&[&str]; 12] = [
    &["demo"],
    &["serve"],
    &["join"],
    &["bench"],
    &["bench", "raw"],
    &["bench", "round"],
    &["bench", "targets"],
    &["doctor"],
    &["plan"],
    &["plan", "listen"],
    &["plan", "probe"],
    &["completions"],
];

fn completions(shell: &str) -> String {
    run(fedlane("completions").arg(shell)).done().out.join("\n")
}

/// What each command takes, as the completions list it.
fn options() -> BTreeMap<Vec<String>, Vec<String>> {
    let script = completions("bash");
    let lines: Vec<&str> = script.lines().map(str::trim).collect();
    let pairs = lines.windows(2).filter_map(|pair| {
        let command = pair[0].strip_suffix(')')?.strip_prefix("fedlane__subcmd__")?;
        let options = pair[1].strip_prefix("opts=\"")?.strip_suffix('"')?;
        let split = |text: &str, by: &str| text.split(by).map(str::to_string).collect();
        Some((split(command, "__subcmd__"), split(options, " ")))
    });
    pairs.collect()
}

#[test]
fn help_mentions_every_flag_and_says_what_it_is_for() {
    let all = options();
    for command in COMMANDS {
        let flags: &Vec<String> = &all[&command.iter().map(|c| c.to_string()).collect::<Vec<_>>()];
        assert!(flags.iter().any(|flag| flag == "--help"), "{command:?}");
        for help in ["-h", "--help"] {
            let text = run(fedlane(command[0]).args(&command[1..]).arg(help)).done().out;
            check_text(&text);
            for flag in
                flags.iter().filter(|f| f.starts_with("--") && !HIDDEN.contains(&f.as_str()))
            {
                assert!(is_explained(&text, flag), "{flag} in\n{}", text.join("\n"));
            }
            for flag in HIDDEN {
                assert!(!text.iter().any(|line| line.contains(flag)), "{flag} in {command:?}");
            }
        }
    }
}

/// Behind the flag and its value, or on the next line, stands a sentence.
fn is_explained(help: &[String], flag: &str) -> bool {
    help.iter().enumerate().any(|(index, line)| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(place) = words.iter().take(2).position(|word| *word == flag) else { return false };
        let same = words[place + 1..].iter().filter(|word| !word.starts_with('<')).count();
        let next = help.get(index + 1).map_or(0, |line| line.split_whitespace().count());
        same > 1 || (same == 0 && next > 1)
    })
}

fn check_text(lines: &[String]) {
    for line in lines {
        assert!(line.chars().count() <= 100, "too long: {line}");
        for broken in ["{", "}", "\u{fffd}", "\x1b", "\t", "TODO"] {
            assert!(!line.contains(broken), "{broken:?} in {line}");
        }
        let sentence = line.trim_start();
        let inner = sentence.split_once("  ").map_or("", |(_, text)| text.trim_start());
        assert!(!inner.contains("  "), "two columns at most: {line}");
    }
}

#[test]
fn the_list_of_commands_has_a_line_for_each() {
    let help = run(&mut fedlane("--help")).done().out;
    check_text(&help);
    for command in COMMANDS {
        let listed = help.iter().any(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some(command[0]) && words.count() > 3
        });
        assert!(listed, "{command:?} in\n{}", help.join("\n"));
    }
}

#[test]
fn the_version_is_that_of_the_package() {
    let version = run(&mut fedlane("--version")).done().out;
    assert_eq!(version, [format!("fedlane {}", env!("CARGO_PKG_VERSION"))]);
}

#[test]
fn shells_accept_their_completions() {
    let directory = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = completions(shell);
        for word in ["serve", "join", "chunk-bytes", "completions"] {
            assert!(script.contains(word), "{word} for {shell}");
        }
        let file = directory.path().join(shell);
        std::fs::write(&file, script).unwrap();
        let is_here = Command::new(shell)
            .args(["-c", "true"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if is_here.is_ok() {
            run(Command::new(shell).arg("-n").arg(&file)).done();
        }
    }
    let load = "source \"$0\" && complete -p fedlane";
    run(Command::new("bash").args(["-c", load]).arg(directory.path().join("bash"))).done();
}

#[test]
fn usage_errors_end_with_status_2_and_name_what_is_wrong() {
    let cases: &[(&str, &str)] = &[
        ("", "Usage: fedlane <COMMAND>"),
        ("fly", "fly"),
        ("--fly", "--fly"),
        ("serve", "--clients"),
        ("serve --clients", "--clients"),
        ("serve --clients=0", "0"),
        ("serve --clients=4097", "4097"),
        ("serve --clients=x", "x"),
        ("serve --clients=1 --rounds=0", "--rounds"),
        ("serve --clients=1 --streams=0", "from 1 to 64"),
        ("serve --clients=1 --streams=65", "from 1 to 64"),
        ("serve --clients=1 --chunk-bytes=4095", "from 4096"),
        ("serve --clients=1 --chunk-bytes=1GiB", "to 16777216"),
        ("serve --clients=1 --chunk-bytes=1parsec", "unknown unit"),
        ("serve --clients=1 --order=random", "arrival"),
        ("serve --clients=1 --on-nonfinite=ignore", "reject"),
        ("serve --clients=1 --clip-norm=0", "above zero"),
        ("serve --clients=1 --clip-norm=-1", "-1"),
        ("serve --clients=1 --clip-norm=nan", "finite"),
        ("serve --clients=1 --clip-norm=inf", "finite"),
        ("serve --clients=1 --clip-norm=much", "not a number"),
        ("serve --clients=1 --send-path=pigeon", "sendfile"),
        ("serve --clients=1 --receive-path=pigeon", "splice"),
        ("serve --clients=1 --receive-path=splice-null", "drops the bytes"),
        ("serve --clients=1 --deadline-ms=1", "--deadline-ms"),
        ("serve --clients=1 more", "more"),
        ("join", "<ADDRESS>"),
        ("join a:1", "--model"),
        ("join a:1 --model=m --generate=1MiB", "cannot be used with"),
        ("join a:1 --generate=1MiB --preset=gemma-2-2b", "cannot be used with"),
        ("join a:1 --preset=nobody", "gemma-2-2b"),
        ("join a:1 --generate=1MiB --train=true", "cannot be used with"),
        ("join a:1 --generate=many", "starts with a number"),
        ("join a:1 --generate=-1", "-1"),
        ("join a:1 --generate=99999TiB", "limit"),
        ("join a:1 --generate=1MiB --dtype=f33", "unknown dtype"),
        ("join a:1 --model=m --examples=-1", "not negative"),
        ("join a:1 --model=m --examples=nan", "finite"),
        ("join a:1 --model=m --examples=inf", "finite"),
        ("join a:1 --model=m --examples=many", "not a number"),
        ("demo --clients=0", "--clients"),
        ("demo --model=m --generate=1MiB", "cannot be used with"),
        ("completions tcsh", "bash"),
    ];
    for (line, word) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fedlane"));
        let ended = run(command.args(line.split_whitespace()));
        assert_eq!(ended.status.code(), Some(2), "{}", ended.said());
        assert!(ended.out.is_empty(), "{}", ended.said());
        assert!(ended.err.join("\n").contains(word), "{word:?}: {}", ended.said());
    }
}

#[test]
fn what_only_the_host_can_know_ends_with_status_1() {
    let words = run(fedlane("demo").args(["--generate=3", "--dtype=f32"])).failed();
    assert!(words.contains("multiple of 4 bytes"), "{words}");
    let words = run(fedlane("serve").args(["--clients=1", "--listen=nowhere"])).failed();
    assert!(words.contains("cannot listen on nowhere"), "{words}");
    let congestion = ["--clients=1", "--listen=127.0.0.1:0", "--congestion=telepathy"];
    let words = run(fedlane("serve").args(congestion)).failed();
    assert!(words.contains("telepathy"), "{words}");
}
