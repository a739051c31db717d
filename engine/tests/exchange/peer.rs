//! A client that says and sends what the test wants.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fedlane::control::{ControlChannel, Heartbeat, Reader, Writer};
use fedlane::error::ControlError;
use fedlane::exchange::{Exchange, Parcel};
use fedlane::limits::MAX_FRAME_BYTES;
use fedlane::link::Link;
use fedlane::manifest::{ChunkTable, Manifest};
use fedlane::wire::checksum::chunk_sum;
use fedlane::wire::hello::{
    Answer, Channel, DataHello, Opening, Place, Preamble, Proof, Reply, Secret,
};
use fedlane::wire::keys::{Binding, ControlKeys};
use fedlane::wire::message::{AggregatorMessage, ChunkRange, ClientMessage, Plan};

use crate::common::PATIENCE;

/// A client under the test's control.
pub struct Peer {
    /// Its control channel.
    pub control: TcpStream,
    /// Its data channels.
    pub streams: Vec<TcpStream>,
    reader: Reader,
    plan: Option<Plan>,
    writer: Arc<Writer>,
    binding: Binding,
    address: String,
    _pulse: Heartbeat,
}

/// What a client of this name says to join there.
pub fn join(name: &str, header: &[u8], place: Place) -> ClientMessage {
    let (name, header) = (name.into(), header.to_vec());
    ClientMessage::Join { name, examples: 0.0, header, place, resumes: None }
}

/// Comes for a place without knowing its secret: the exchange closes without a word more.
pub fn knock_without_secret(exchange: &Exchange, place: Place) {
    let link = Link::plain(TcpStream::connect(exchange.address()).unwrap());
    link.write_fixed(&Preamble::new(Channel::Control)).unwrap();
    link.write_fixed(&Opening { place, nonce: [7; 32] }).unwrap();
    let until = Instant::now() + PATIENCE;
    let preamble: Preamble = link.read_fixed(until).unwrap();
    assert_eq!(preamble.answer().unwrap(), Answer::Admitted);
    let reply: Reply = link.read_fixed(until).unwrap();
    let keys = ControlKeys::new(&Secret::OPEN, &[7; 32], &reply.nonce);
    assert!(!keys.is_aggregator(&reply.proof));
    link.write_fixed(&keys.client_proof()).unwrap();
    assert!(matches!(link.read_fixed::<u8>(until), Err(ControlError::Closed)));
}

impl Peer {
    /// Says that first, and from then on gives signs of life.
    pub fn come(exchange: &Exchange, first: &ClientMessage, secret: Secret) -> Peer {
        let address = exchange.address().to_string();
        let control = TcpStream::connect(&address).unwrap();
        let link = Link::plain(control.try_clone().unwrap());
        let channel = ControlChannel::open(link, &secret, PATIENCE).unwrap();
        let ControlChannel { reader, writer, binding } = channel;
        writer.send(first).unwrap();
        let listeners = Arc::new(Mutex::new(vec![writer.clone()]));
        let interval = Duration::from_millis(200);
        let pulse = Heartbeat::start(listeners, ClientMessage::Alive, interval).unwrap();
        let (streams, plan) = (Vec::new(), None);
        Peer { control, reader, streams, plan, writer, binding, address, _pulse: pulse }
    }

    /// Joins as the client of that secret.
    pub fn join(exchange: &Exchange, name: &str, model: &Manifest, secret: Secret) -> Peer {
        Peer::come(exchange, &join(name, model.header(), secret.place()), secret)
    }

    /// The next message that is no sign of life.
    pub fn next(&mut self) -> Result<AggregatorMessage, ControlError> {
        loop {
            match self.reader.read(MAX_FRAME_BYTES)? {
                // It sends what is wanted anyway.
                AggregatorMessage::Alive | AggregatorMessage::Want { .. } => {}
                message => return Ok(message),
            }
        }
    }

    pub fn say(&self, message: &ClientMessage) {
        self.writer.send(message).unwrap();
    }

    /// Waits for the plan.
    pub fn await_plan(&mut self) -> Plan {
        let message = self.next().unwrap();
        let AggregatorMessage::Plan(plan) = message else { panic!("{message:?} is no plan") };
        self.plan = Some(plan.clone());
        plan
    }

    /// Opens one data channel with the plan's ticket.
    pub fn open(&mut self, stream: u32) -> Answer {
        let (socket, answer) = self.dialler(stream)();
        self.streams.push(socket);
        answer
    }

    /// Does that when it is called, on any thread.
    pub fn dialler(&self, stream: u32) -> impl FnOnce() -> (TcpStream, Answer) + Send + use<> {
        let key = self.binding.key(&self.plan.as_ref().unwrap().ticket);
        self.dialler_with(stream, &key)
    }

    /// Opens one data channel with a proof that this key makes.
    pub fn open_with(&mut self, stream: u32, key: &[u8; 32]) -> Answer {
        let (socket, answer) = self.dialler_with(stream, key)();
        self.streams.push(socket);
        answer
    }

    fn dialler_with(
        &self,
        stream: u32,
        key: &[u8; 32],
    ) -> impl FnOnce() -> (TcpStream, Answer) + Send + use<> {
        let plan = self.plan.as_ref().unwrap();
        let hello = DataHello::new(plan.session, plan.client, stream, key);
        let address = self.address.clone();
        move || {
            let socket = TcpStream::connect(&address).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            let link = Link::plain(socket.try_clone().unwrap());
            link.write_fixed(&Preamble::new(Channel::Data)).unwrap();
            link.write_fixed(&hello).unwrap();
            let until = Instant::now() + PATIENCE;
            let preamble: Preamble = link.read_fixed(until).unwrap();
            let answer = preamble.answer().unwrap();
            if answer == Answer::Admitted {
                let _proof: Proof = link.read_fixed(until).unwrap();
            }
            (socket, answer)
        }
    }

    /// Waits for the plan and opens all data channels.
    pub fn agree(&mut self) {
        for stream in 0..self.await_plan().streams {
            assert_eq!(self.open(stream), Answer::Admitted);
        }
    }

    fn chunks(&self, manifest: &Manifest) -> (ChunkTable, Vec<Range<usize>>) {
        let chunks = manifest.chunks(self.plan.as_ref().unwrap().chunk_bytes).unwrap();
        let lanes = chunks.lanes(self.streams.len());
        (chunks, lanes)
    }

    /// Goes through everything up to the bytes of the update: announces all checksums.
    pub fn begin_upload(&mut self, update: &Parcel) {
        self.agree();
        assert_eq!(self.next().unwrap(), AggregatorMessage::Upload { round: 1 });
        self.say(&ClientMessage::Uploading { round: 1 });
        let (chunks, lanes) = self.chunks(update.manifest());
        for lane in lanes {
            let first = lane.start as u32;
            let sums = lane.map(|index| {
                let range = chunks.get(index).bytes;
                let bytes = &update.region().bytes()[range.start as usize..range.end as usize];
                chunk_sum(bytes).to_le_bytes()
            });
            self.say(&ClientMessage::Sums { first, sums: sums.collect() });
        }
    }

    /// Sends the first `part` of each stream's bytes, and those that `changed` makes of them.
    pub fn send(&mut self, update: &Parcel, part: f64, changed: impl Fn(&mut [u8])) {
        let (chunks, lanes) = self.chunks(update.manifest());
        for (stream, lane) in self.streams.iter_mut().zip(lanes) {
            let range = chunks.bytes_of(&lane);
            let length = ((range.end - range.start) as f64 * part) as usize;
            let mut bytes = update.region().bytes()[range.start as usize..][..length].to_vec();
            changed(&mut bytes);
            // An exchange that has seen enough closes.
            let _ = stream.write_all(&bytes);
        }
    }

    /// Asks for a model of that layout.
    pub fn want(&self, manifest: &Manifest) {
        for (stream, lane) in self.chunks(manifest).1.iter().enumerate() {
            let chunks = vec![ChunkRange::from(lane)];
            self.say(&ClientMessage::Want { stream: stream as u32, chunks });
        }
    }

    /// Reads a model of that layout from the data channels.
    pub fn receive(&mut self, manifest: &Manifest) -> Vec<u8> {
        let (chunks, lanes) = self.chunks(manifest);
        let mut model = Vec::new();
        for (stream, lane) in self.streams.iter_mut().zip(lanes) {
            let range = chunks.bytes_of(&lane);
            let mut bytes = vec![0; (range.end - range.start) as usize];
            stream.read_exact(&mut bytes).unwrap();
            model.extend(bytes);
        }
        model
    }
}
