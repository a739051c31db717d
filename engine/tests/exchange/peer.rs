//! A client that says and sends what the test wants.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fedlane::control::{Heartbeat, Reader, Writer, read_fixed, write_fixed};
use fedlane::error::ControlError;
use fedlane::exchange::{Exchange, Parcel};
use fedlane::limits::MAX_FRAME_BYTES;
use fedlane::manifest::{ChunkTable, Manifest};
use fedlane::wire::checksum::chunk_sum;
use fedlane::wire::frame;
use fedlane::wire::hello::{Answer, Channel, DataHello, Place, Preamble, Secret, bind_ticket};
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
    joined: Vec<u8>,
    address: String,
    _pulse: Heartbeat,
}

/// What a client of this name says to join there.
pub fn join(name: &str, header: &[u8], place: Place) -> ClientMessage {
    let (name, header) = (name.into(), header.to_vec());
    ClientMessage::Join { name, examples: 0.0, header, place, resumes: None }
}

impl Peer {
    /// Says that first, and from then on gives signs of life.
    pub fn come(exchange: &Exchange, first: &ClientMessage) -> Peer {
        let address = exchange.address().to_string();
        let mut control = TcpStream::connect(&address).unwrap();
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        write_fixed(&mut control, &Preamble::new(Channel::Control)).unwrap();
        let answer: Preamble = read_fixed(&mut control).unwrap();
        assert_eq!(answer.channel().unwrap(), Channel::Control);
        let writer = Arc::new(Writer::new(&control, PATIENCE).unwrap());
        writer.send(first).unwrap();
        let listeners = Arc::new(Mutex::new(vec![writer.clone()]));
        let interval = Duration::from_millis(200);
        let pulse = Heartbeat::start(listeners, ClientMessage::Alive, interval).unwrap();
        let joined = frame::encode(first).unwrap();
        let (streams, plan) = (Vec::new(), None);
        let reader = Reader::new(control.try_clone().unwrap());
        Peer { control, reader, streams, plan, writer, joined, address, _pulse: pulse }
    }

    /// Joins as the client of that secret.
    pub fn join(exchange: &Exchange, name: &str, model: &Manifest, secret: Secret) -> Peer {
        Peer::come(exchange, &join(name, model.header(), secret.place()))
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

    /// Opens one data channel with a proof that this secret makes.
    pub fn open(&mut self, stream: u32, secret: Secret) -> Answer {
        let (socket, answer) = self.dialler(stream, secret)();
        self.streams.push(socket);
        answer
    }

    /// Does that when it is called, on any thread.
    pub fn dialler(
        &self,
        stream: u32,
        secret: Secret,
    ) -> impl FnOnce() -> (TcpStream, Answer) + Send + use<> {
        let plan = self.plan.as_ref().unwrap();
        let key = bind_ticket(&plan.ticket, &secret, &self.joined);
        let hello = DataHello::new(plan.session, plan.client, stream, &key);
        let address = self.address.clone();
        move || {
            let mut socket = TcpStream::connect(&address).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            write_fixed(&mut socket, &Preamble::new(Channel::Data)).unwrap();
            write_fixed(&mut socket, &hello).unwrap();
            let answer: Preamble = read_fixed(&mut socket).unwrap();
            (socket, answer.answer().unwrap())
        }
    }

    /// Waits for the plan and opens all data channels.
    pub fn agree(&mut self, secret: Secret) {
        for stream in 0..self.await_plan().streams {
            assert_eq!(self.open(stream, secret), Answer::Admitted);
        }
    }

    fn chunks(&self, manifest: &Manifest) -> (ChunkTable, Vec<Range<usize>>) {
        let chunks = manifest.chunks(self.plan.as_ref().unwrap().chunk_bytes).unwrap();
        let lanes = chunks.lanes(self.streams.len());
        (chunks, lanes)
    }

    /// Goes through everything up to the bytes of the update: announces all checksums.
    pub fn begin_upload(&mut self, secret: Secret, update: &Parcel) {
        self.agree(secret);
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
