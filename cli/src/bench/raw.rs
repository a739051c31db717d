//! Plain sockets, as anyone would write them: the baseline.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Barrier;

use anyhow::Context;
use clap::Args;
use fedlane::aggregator::default_streams;
use fedlane::control::{Congestion, dial, listen, settle};
use fedlane::limits;
use fedlane::manifest::{Dtype, synthetic};
use fedlane::meter::{Meter, Phase};
use fedlane::paths::{ReceiveKind, SendKind};
use fedlane::receiver::{Landing, Lands};
use fedlane::region::Region;
use fedlane::sender::Piece;
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use fedlane::sys::process;
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::json;

use crate::args::parse_bytes;
use crate::output::{Output, phase_fields};

const OUTPUT: Output = Output { json: true };

/// Bytes that one call of a sender or receiver moves at most.
const SEND_BYTES: usize = 1 << 20;
const RECEIVE_BYTES: usize = 256 << 10;

/// The receiver.
#[derive(Args)]
pub struct RawReceive {
    #[arg(long)]
    clients: u32,
    #[arg(long)]
    rounds: u32,
    #[arg(long, value_parser = parse_bytes)]
    bytes: u64,
    #[arg(long, default_value_t = default_streams())]
    streams: usize,
    #[arg(long)]
    receive_path: ReceiveKind,
    #[arg(long)]
    json: bool,
}

/// A sender.
#[derive(Args)]
pub struct RawSend {
    address: String,
    #[arg(long)]
    rounds: u32,
    #[arg(long, value_parser = parse_bytes)]
    bytes: u64,
    #[arg(long, default_value_t = default_streams())]
    streams: usize,
    #[arg(long, default_value = "write")]
    send_path: SendKind,
    #[arg(long)]
    json: bool,
}

impl RawReceive {
    pub fn run(self) -> anyhow::Result<()> {
        let listener = listen("127.0.0.1:0", &Congestion::Auto)?;
        OUTPUT.event("listening", json!({ "address": listener.local_addr()?.to_string() }), "");
        let mut sockets = Vec::new();
        for _ in 0..self.clients as usize * self.streams {
            let (socket, _) = listener.accept()?;
            settle(&socket, &Congestion::Auto)?;
            sockets.push(socket);
        }
        let parts = parts(self.bytes, self.streams);
        // Every sender says which of its parts it will send.
        let mut streams = Vec::new();
        for mut socket in sockets {
            let mut part = [0];
            socket.read_exact(&mut part)?;
            let bytes = parts.get(usize::from(part[0])).context("no such part")?;
            streams.push((socket, (bytes.end - bytes.start) as usize));
        }
        for round in 1..=self.rounds {
            let phase = self.round(round, &mut streams)?.received_by(self.receive_path);
            OUTPUT.event("phase", phase_fields(&phase), "");
        }
        OUTPUT.event("done", json!({ "peak_rss_bytes": process::peak_rss_bytes() }), "");
        Ok(())
    }

    fn round(&self, round: u32, streams: &mut [(TcpStream, usize)]) -> anyhow::Result<Phase> {
        let ready = Barrier::new(streams.len() + 1);
        let bytes = u64::from(self.clients) * self.bytes;
        std::thread::scope(|scope| {
            let receivers: Vec<_> = streams
                .iter_mut()
                .map(|(socket, bytes)| {
                    let (ready, kind) = (&ready, self.receive_path);
                    scope.spawn(move || {
                        let buffer = Region::new(RECEIVE_BYTES as u64)?;
                        ready.wait();
                        socket.write_all(&[0])?;
                        receive_all(socket, *bytes, kind, buffer)
                    })
                })
                .collect();
            ready.wait();
            let meter = Meter::start("upload", round);
            for receiver in receivers {
                receiver.join().map_err(|_| anyhow::anyhow!("a receiver panicked"))??;
            }
            Ok(meter.stop(bytes))
        })
    }
}

fn receive_all(
    socket: &mut TcpStream,
    bytes: usize,
    kind: ReceiveKind,
    mut buffer: Region,
) -> anyhow::Result<()> {
    let mut left = bytes;
    if kind.lands() == Lands::Memory {
        let buffer = buffer.bytes_mut().0;
        while left > 0 {
            let length = left.min(buffer.len());
            let received = socket.read(&mut buffer[..length])?;
            anyhow::ensure!(received > 0, "a sender ended early");
            left -= received;
        }
        return Ok(());
    }
    let mut path = kind.open()?;
    while left > 0 {
        let (_, file) = buffer.bytes_mut();
        let landing =
            Landing { length: left.min(RECEIVE_BYTES), bytes: None, file: Some((file, 0)) };
        match path.receive(socket.as_fd(), landing) {
            Ok(0) => anyhow::bail!("a sender ended early"),
            Ok(received) => left -= received,
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(socket, PollFlags::IN)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

impl RawSend {
    pub fn run(self) -> anyhow::Result<()> {
        let source = Generator::new(synthetic(self.bytes, Dtype::U8)?, 1);
        let mut region = Region::new(self.bytes)?;
        source.read(0, region.bytes_mut().0)?;
        let mut streams = Vec::new();
        for (number, part) in parts(self.bytes, self.streams).into_iter().enumerate() {
            let mut socket = dial(&self.address, &Congestion::Auto, limits::DEADLINE)?;
            socket.write_all(&[number as u8])?;
            streams.push((socket, part));
        }
        for round in 1..=self.rounds {
            let phase = self.round(round, &region, &mut streams)?.sent_by(self.send_path);
            OUTPUT.event("phase", phase_fields(&phase), "");
        }
        OUTPUT.event("done", json!({ "peak_rss_bytes": process::peak_rss_bytes() }), "");
        Ok(())
    }

    fn round(
        &self,
        round: u32,
        region: &Region,
        streams: &mut [(TcpStream, Range<u64>)],
    ) -> anyhow::Result<Phase> {
        let kind = self.send_path;
        let meter = Meter::start("upload", round);
        std::thread::scope(|scope| {
            let senders: Vec<_> = streams
                .iter_mut()
                .map(|(socket, part)| scope.spawn(move || send_all(socket, region, part, kind)))
                .collect();
            for sender in senders {
                sender.join().map_err(|_| anyhow::anyhow!("a sender panicked"))??;
            }
            Ok(meter.stop(self.bytes))
        })
    }
}

fn send_all(
    socket: &mut TcpStream,
    region: &Region,
    part: &Range<u64>,
    kind: SendKind,
) -> anyhow::Result<()> {
    socket.read_exact(&mut [0])?;
    let bytes = &region.bytes()[part.start as usize..part.end as usize];
    if kind.name() == "write" {
        for piece in bytes.chunks(SEND_BYTES) {
            socket.write_all(piece)?;
        }
        return Ok(());
    }
    socket.set_nonblocking(true)?;
    let mut path = kind.open()?;
    let mut sent = 0;
    while sent < bytes.len() {
        let length = (bytes.len() - sent).min(SEND_BYTES);
        let piece = Piece {
            length,
            bytes: Some(&bytes[sent..sent + length]),
            file: Some((region.file(), part.start + sent as u64)),
        };
        match path.send(socket.as_fd(), piece) {
            Ok(more) => sent += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(socket, PollFlags::OUT)?,
            Err(error) => return Err(error.into()),
        }
    }
    socket.set_nonblocking(false)?;
    Ok(())
}

/// The part of the bytes that each stream carries.
fn parts(bytes: u64, streams: usize) -> Vec<Range<u64>> {
    let streams = streams as u64;
    (0..streams).map(|i| bytes * i / streams..bytes * (i + 1) / streams).collect()
}

fn wait(socket: &TcpStream, flags: PollFlags) -> anyhow::Result<()> {
    poll(&mut [PollFd::new(socket, flags)], None)?;
    Ok(())
}
