//! Whole sessions from files to files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::models::{EXAMPLES, Layout};
use crate::process::{Finished, Process, join, serve, start};

/// A client of a session.
#[derive(Clone)]
pub struct Member {
    pub name: String,
    pub model: PathBuf,
    pub examples: String,
}

impl Member {
    pub fn new(name: &str, model: PathBuf, examples: impl ToString) -> Member {
        Member { name: name.into(), model, examples: examples.to_string() }
    }
}

/// A session that ended well.
pub struct Ended {
    pub serve: Finished,
    pub clients: Vec<Finished>,
    /// The server's output; those of the clients have the same bytes.
    pub model: PathBuf,
}

/// Averages the members' models. Everyone writes the mean, and all get the same bytes.
pub fn average(
    directory: &Path,
    members: &[Member],
    serve_args: &[&str],
    join_args: &[&str],
) -> Ended {
    let model = directory.join("mean.safetensors");
    let mut command = serve(members.len());
    command.arg("--output").arg(&model);
    let mut server = start(command, serve_args);
    let address = server.address();
    let outputs: Vec<PathBuf> =
        members.iter().map(|member| directory.join(format!("{}.mean", member.name))).collect();
    let clients: Vec<Process> = members
        .iter()
        .zip(&outputs)
        .map(|(member, output)| {
            let mut command = join(&address, &member.name, &member.model);
            command.args(["--examples", &member.examples]).arg("--output").arg(output);
            start(command, join_args)
        })
        .collect();
    let clients: Vec<Finished> = clients.into_iter().map(|client| client.finish().done()).collect();
    let serve = server.finish().done();
    for output in &outputs {
        assert!(same_bytes(output, &model), "{} is another model", output.display());
    }
    Ended { serve, clients, model }
}

/// Averages the two clients of a layout and checks every byte of the result.
pub fn average_exactly(layout: &Layout, serve_args: &[&str], join_args: &[&str]) -> Ended {
    let directory = tempfile::tempdir().unwrap();
    let members = two_members(layout, directory.path());
    let ended = average(directory.path(), &members, serve_args, join_args);
    let expected = layout.mean();
    let got = fs::read(&ended.model).unwrap();
    let wrong = got.iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!((wrong, got.len()), (None, expected.len()), "first wrong byte, and the length");
    ended
}

/// The two clients of a layout, with their files.
pub fn two_members(layout: &Layout, directory: &Path) -> Vec<Member> {
    ["a", "b"]
        .iter()
        .enumerate()
        .map(|(client, name)| {
            let file = directory.join(format!("{name}.safetensors"));
            layout.write_client(client, &file);
            Member::new(name, file, EXAMPLES[client])
        })
        .collect()
}

/// Whether two files have the same bytes.
pub fn same_bytes(a: &Path, b: &Path) -> bool {
    fs::read(a).unwrap() == fs::read(b).unwrap()
}
