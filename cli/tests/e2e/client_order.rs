//! `--order client` gives the same bits whatever comes first.

use std::fs;
use std::path::{Path, PathBuf};

use crate::process::{join, serve, start};

const ELEMENTS: usize = 3000;
const NAMES: [&str; 3] = ["a", "b", "c"];

/// Numbers that swallow each other: the sum depends on which two meet first.
fn numbers(client: usize) -> impl Iterator<Item = f32> {
    (0..ELEMENTS).map(move |index| {
        let small = 1.0 + index as f32 / 7.0;
        [3e7 + small, small, -1e7 * small][client]
    })
}

/// The documented rule for three clients of weight 1: the scaled weights are 1/8.
fn mean(order: [usize; 3]) -> Vec<u8> {
    let [mut first, mut second, mut third] = order.map(numbers);
    let mut next = || {
        let sum = 0.125 * first.next()? + 0.125 * second.next()?;
        Some((sum + 0.125 * third.next()?) / 0.375)
    };
    std::iter::from_fn(&mut next).flat_map(f32::to_le_bytes).collect()
}

fn file(data: &[u8]) -> Vec<u8> {
    let shape = format!(r#"[{ELEMENTS}],"data_offsets":[0,{}]"#, 4 * ELEMENTS);
    let header = format!(r#"{{"w":{{"dtype":"F32","shape":{shape}}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// Averages with clients that join in the order of `arrival`, each a while after the other, and
/// upload in the order of `upload`.
fn average(directory: &Path, arrival: [usize; 3], upload: [usize; 3]) -> PathBuf {
    let output = directory.join("mean");
    let mut command = serve(3);
    command.arg("--output").arg(&output);
    let args = ["--order=client", "--streams=2", "--chunk-bytes=4KiB"];
    let mut server = start(command, args);
    let address = server.address();
    let mut clients = Vec::new();
    for client in arrival {
        let place = upload.iter().position(|&other| other == client).unwrap();
        let join = join(&address, NAMES[client], &directory.join(NAMES[client]));
        clients.push(start(join, ["--train", &format!("sleep 0.{}", 2 * place)]));
        server.await_note(&format!("client \"{}\"", NAMES[client]));
    }
    clients.into_iter().for_each(|client| drop(client.finish().done()));
    server.finish().done();
    output
}

#[test]
fn the_same_bits_whoever_comes_first() {
    let expected = mean([0, 1, 2]);
    // Otherwise this test would show nothing.
    for other in [[0, 2, 1], [1, 2, 0]] {
        assert!(expected != mean(other), "{other:?}");
    }
    let directory = tempfile::tempdir().unwrap();
    for (client, name) in NAMES.iter().enumerate() {
        let data: Vec<u8> = numbers(client).flat_map(f32::to_le_bytes).collect();
        fs::write(directory.path().join(name), file(&data)).unwrap();
    }
    for (arrival, upload) in [
        ([0, 1, 2], [0, 1, 2]),
        ([2, 1, 0], [2, 1, 0]),
        ([1, 2, 0], [0, 2, 1]),
        ([0, 2, 1], [1, 2, 0]),
        ([2, 0, 1], [2, 0, 1]),
        ([1, 0, 2], [1, 0, 2]),
    ] {
        let output = average(directory.path(), arrival, upload);
        let same = fs::read(output).unwrap() == file(&expected);
        assert!(same, "joined as {arrival:?}, uploaded as {upload:?}");
    }
}
