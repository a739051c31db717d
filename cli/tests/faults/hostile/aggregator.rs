//! An aggregator that says and sends what the test wants.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fedlane::control::{ControlChannel, Heartbeat, Reader, Writer};
use fedlane::limits::MAX_FRAME_BYTES;
use fedlane::link::Link;
use fedlane::manifest::ChunkTable;
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use fedlane::wire::checksum::{chunk_sum, model_digest};
use fedlane::wire::hello::{Answer, Channel, DataHello, Preamble, Secret};
use fedlane::wire::keys::Binding;
use fedlane::wire::message::{AggregatorMessage, ClientMessage, Plan};

/// How long it waits for the real client before the test fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// An aggregator under the test's control, for one client.
pub struct FakeAggregator {
    /// Where it listens.
    pub listener: TcpListener,
    /// The client's data channels.
    pub streams: Vec<TcpStream>,
    /// What its messages go through.
    pub writer: Arc<Writer>,
    binding: Binding,
    source: Generator,
    plan: Plan,
    reader: Reader,
    _control: TcpStream,
    _pulse: Heartbeat,
}

impl FakeAggregator {
    /// A plan without fault for [`super::model`].
    pub fn plan() -> Plan {
        Plan {
            session: [7; 16],
            client: 0,
            ticket: [9; 32],
            streams: 2,
            chunk_bytes: super::CHUNK_BYTES,
            rounds: 1,
            deadline_ms: 600,
            header: Vec::new(),
        }
    }

    /// Lets one client join, and gives it signs of life from then on.
    pub fn welcome(listener: TcpListener) -> FakeAggregator {
        let (control, _) = listener.accept().unwrap();
        let link = Link::plain(control.try_clone().unwrap());
        let until = Instant::now() + PATIENCE;
        let preamble: Preamble = link.read_fixed(until).unwrap();
        assert_eq!(preamble.channel().unwrap(), Channel::Control);
        let find = |_: &_| Ok(Some(Secret::OPEN));
        let (channel, _) = ControlChannel::accept(link, find, until).unwrap();
        let ControlChannel { mut reader, writer, binding } = channel;
        let join: ClientMessage = reader.read(MAX_FRAME_BYTES).unwrap();
        assert!(matches!(join, ClientMessage::Join { .. }), "{join:?}");
        let listeners = Arc::new(Mutex::new(vec![writer.clone()]));
        let interval = Duration::from_millis(400);
        let pulse = Heartbeat::start(listeners, AggregatorMessage::Alive, interval).unwrap();
        FakeAggregator {
            binding,
            listener,
            streams: Vec::new(),
            writer,
            source: Generator::new(super::model(), 3),
            plan: FakeAggregator::plan(),
            reader,
            _control: control,
            _pulse: pulse,
        }
    }

    /// As [`FakeAggregator::welcome`], and then sends the plan and opens all data channels.
    pub fn agree(listener: TcpListener) -> FakeAggregator {
        let mut fake = FakeAggregator::welcome(listener);
        fake.say(&AggregatorMessage::Plan(FakeAggregator::plan()));
        for _ in 0..fake.plan.streams {
            let socket = fake.answer_stream(Answer::Admitted);
            fake.streams.push(socket);
        }
        fake
    }

    /// Accepts one data channel and answers it.
    pub fn answer_stream(&self, answer: Answer) -> TcpStream {
        let (socket, _) = self.listener.accept().unwrap();
        let link = Link::plain(socket.try_clone().unwrap());
        let until = Instant::now() + PATIENCE;
        let preamble: Preamble = link.read_fixed(until).unwrap();
        assert_eq!(preamble.channel().unwrap(), Channel::Data);
        let hello: DataHello = link.read_fixed(until).unwrap();
        let key = self.binding.key(&self.plan.ticket);
        assert!(hello.is_admitted_by(&self.plan.session, &key));
        match answer {
            Answer::Admitted => link.write_fixed(&hello.admission(&key)).unwrap(),
            other => link.write_fixed(&Preamble::answering(Channel::Data, other)).unwrap(),
        }
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    }

    /// Says something.
    pub fn say(&self, message: &AggregatorMessage) {
        self.writer.send(message).unwrap();
    }

    fn chunks(&self) -> ChunkTable {
        self.source.manifest().chunks(self.plan.chunk_bytes).unwrap()
    }

    /// The chunks of each stream.
    pub fn lanes(&self) -> Vec<Range<usize>> {
        self.chunks().lanes(self.plan.streams as usize)
    }

    /// The bytes that belong on one stream.
    pub fn bytes(&self, stream: usize) -> Vec<u8> {
        let range = self.chunks().bytes_of(&self.lanes()[stream]);
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.source.read(range.start, &mut bytes).unwrap();
        bytes
    }

    /// The checksums of the whole model.
    pub fn sums(&self) -> Vec<u64> {
        let chunks = self.chunks();
        let sum = |index| {
            let range = chunks.get(index).bytes;
            let mut bytes = vec![0; (range.end - range.start) as usize];
            self.source.read(range.start, &mut bytes).unwrap();
            chunk_sum(&bytes)
        };
        (0..chunks.len()).map(sum).collect()
    }

    /// The digest of the model.
    pub fn digest(&self) -> [u8; 32] {
        let layout = self.source.manifest().layout_digest();
        model_digest(&layout, self.plan.chunk_bytes, &self.sums())
    }

    /// Announces an initial model with this digest, and these checksums of its chunks, and waits until
    /// it is wanted.
    pub fn announce(&mut self, digest: [u8; 32], sums: &[u64]) {
        self.say(&AggregatorMessage::Download { round: 0, digest });
        for lane in self.lanes() {
            let first = lane.start as u32;
            let sums = sums[lane].iter().map(|sum| sum.to_le_bytes()).collect();
            self.say(&AggregatorMessage::Sums { first, sums });
        }
        let mut wanted = 0;
        while wanted < self.plan.streams {
            let message: ClientMessage = self.reader.read(MAX_FRAME_BYTES).unwrap();
            wanted += u32::from(matches!(message, ClientMessage::Want { .. }));
        }
    }

    /// Sends these bytes on one stream. A client that has given up need not take them.
    pub fn send(&mut self, stream: usize, bytes: &[u8]) {
        let _ = self.streams[stream].write_all(bytes);
    }
}
