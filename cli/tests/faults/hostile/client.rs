//! A client that says and sends what the test wants.

use std::cell::OnceCell;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fedlane::control::{ControlChannel, Heartbeat, Reader, Writer};
use fedlane::error::ControlError;
use fedlane::limits::MAX_FRAME_BYTES;
use fedlane::link::Link;
use fedlane::manifest::{ChunkTable, Manifest};
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use fedlane::wire::checksum::{chunk_sum, model_digest};
use fedlane::wire::hello::{Answer, Channel, DataHello, Preamble, Proof, Secret};
use fedlane::wire::keys::Binding;
use fedlane::wire::message::{AggregatorMessage, ChunkRange, ClientMessage, Plan};

/// How long a hostile peer waits for the real one before the test fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// A client under the test's control.
pub struct HostileClient {
    /// Its control channel.
    pub control: TcpStream,
    reader: Reader,
    /// Its data channels.
    pub streams: Vec<TcpStream>,
    /// What its messages go through.
    pub writer: Arc<Writer>,
    binding: Binding,
    source: Generator,
    plan: Option<Plan>,
    address: String,
    pulse: Option<Heartbeat>,
    bytes: OnceCell<Vec<Vec<u8>>>,
}

/// Says hello on a connection, and what is answered.
pub fn hello_answer(socket: &TcpStream, hello: &DataHello) -> Answer {
    let link = Link::plain(socket.try_clone().unwrap());
    link.write_fixed(&Preamble::new(Channel::Data)).unwrap();
    link.write_fixed(hello).unwrap();
    let until = Instant::now() + PATIENCE;
    let preamble: Preamble = link.read_fixed(until).unwrap();
    let answer = preamble.answer().unwrap();
    if answer == Answer::Admitted {
        let _proof: Proof = link.read_fixed(until).unwrap();
    }
    answer
}

impl HostileClient {
    /// Says that it wants to join, with parameters that are generated for `manifest`.
    pub fn join(address: &str, name: &str, manifest: &Manifest) -> HostileClient {
        let join = ClientMessage::Join {
            name: name.to_string(),
            examples: 1.0,
            header: manifest.header().to_vec(),
            place: Secret::OPEN.place(),
            resumes: None,
        };
        HostileClient::join_with(TcpStream::connect(address).unwrap(), &join, manifest)
    }

    /// Begins with this message on this connection.
    pub fn join_with(
        control: TcpStream,
        first: &ClientMessage,
        manifest: &Manifest,
    ) -> HostileClient {
        let address = control.peer_addr().unwrap().to_string();
        let link = Link::plain(control.try_clone().unwrap());
        let channel = ControlChannel::open(link, &Secret::OPEN, PATIENCE).unwrap();
        let ControlChannel { reader, writer, binding } = channel;
        writer.send(first).unwrap();
        let source = Generator::new(manifest.clone(), 2);
        HostileClient {
            control,
            reader,
            binding,
            streams: Vec::new(),
            writer,
            source,
            plan: None,
            address,
            pulse: None,
            bytes: OnceCell::new(),
        }
    }

    /// From now on it gives signs of life whatever else it does.
    pub fn keep_alive(&mut self) {
        let listeners = Arc::new(Mutex::new(vec![self.writer.clone()]));
        let interval = Duration::from_millis(400);
        self.pulse = Some(Heartbeat::start(listeners, ClientMessage::Alive, interval).unwrap());
    }

    /// Waits for the plan, with signs of life.
    pub fn await_plan(&mut self) -> Plan {
        self.keep_alive();
        match self.next().unwrap() {
            AggregatorMessage::Plan(mut plan) => {
                // What its proofs are made with.
                plan.ticket = self.binding.key(&plan.ticket);
                self.plan = Some(plan);
            }
            other => panic!("{other:?} instead of a plan"),
        }
        self.plan().clone()
    }

    /// The plan that was agreed on.
    pub fn plan(&self) -> &Plan {
        self.plan.as_ref().expect("await_plan() comes first")
    }

    /// Opens the data channels of that plan with these numbers.
    pub fn open(&mut self, streams: Range<u32>) {
        for stream in streams {
            let (plan, address) = (self.plan(), &self.address);
            let hello = DataHello::new(plan.session, plan.client, stream, &plan.ticket);
            let socket = TcpStream::connect(address).unwrap();
            assert_eq!(hello_answer(&socket, &hello), Answer::Admitted);
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            self.streams.push(socket);
        }
    }

    /// Goes through everything up to the request for the update.
    pub fn await_upload(&mut self) {
        let plan = self.await_plan();
        self.open(0..plan.streams);
        self.await_request();
    }

    /// Waits for the request for the update.
    pub fn await_request(&mut self) {
        assert_eq!(self.next().unwrap(), AggregatorMessage::Upload { round: 1 });
    }

    /// The next message that is no sign of life, and does not ask for what it sends anyway.
    pub fn next(&mut self) -> Result<AggregatorMessage, ControlError> {
        loop {
            match self.reader.read(MAX_FRAME_BYTES)? {
                AggregatorMessage::Alive | AggregatorMessage::Want { .. } => {}
                message => return Ok(message),
            }
        }
    }

    /// Says something.
    pub fn say(&self, message: &ClientMessage) {
        self.writer.send(message).unwrap();
    }

    /// Says a message of this length and these bytes, with the right seals.
    pub fn say_frame(&self, frame: &[u8]) {
        self.writer.send_frame(frame).unwrap();
    }

    /// Puts bytes on the control channel.
    pub fn say_bytes(&mut self, bytes: &[u8]) {
        self.control.write_all(bytes).unwrap();
    }

    fn chunks(&self) -> ChunkTable {
        self.source.manifest().chunks(self.plan().chunk_bytes).unwrap()
    }

    fn lanes(&self) -> Vec<Range<usize>> {
        self.chunks().lanes(self.plan().streams as usize)
    }

    /// The bytes that belong on one stream.
    pub fn bytes(&self, stream: usize) -> Vec<u8> {
        // Made once: making much of it takes longer than the deadlines here.
        let made = self.bytes.get_or_init(|| self.lanes().iter().map(|l| self.make(l)).collect());
        made[stream].clone()
    }

    /// Makes the first element of its update a NaN.
    pub fn spoil(&mut self) {
        self.bytes(0);
        let bytes = self.bytes.get_mut().expect("made above");
        bytes[0][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    }

    fn make(&self, lane: &Range<usize>) -> Vec<u8> {
        let range = self.chunks().bytes_of(lane);
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.source.read(range.start, &mut bytes).unwrap();
        bytes
    }

    /// Announces the right checksums of one stream.
    pub fn announce(&self, stream: usize) {
        let (chunks, lane) = (self.chunks(), &self.lanes()[stream]);
        let (start, bytes) = (chunks.bytes_of(lane).start, self.bytes(stream));
        let sums = lane.clone().map(|index| {
            let range = chunks.get(index).bytes;
            chunk_sum(&bytes[(range.start - start) as usize..(range.end - start) as usize])
        });
        let sums = sums.map(u64::to_le_bytes).collect();
        self.say(&ClientMessage::Sums { first: lane.start as u32, sums });
    }

    /// Goes through everything, says that the upload begins, and announces all checksums.
    pub fn begin_upload(&mut self) {
        self.await_upload();
        self.announce_upload();
    }

    /// Says that the upload begins, and announces all checksums.
    pub fn announce_upload(&self) {
        self.bytes(0);
        self.say(&ClientMessage::Uploading { round: 1 });
        (0..self.streams.len()).for_each(|stream| self.announce(stream));
    }

    /// Sends the update as an honest client does, and waits until it was averaged.
    pub fn upload(&mut self) {
        self.begin_upload();
        let bytes: Vec<_> = (0..self.streams.len()).map(|stream| self.bytes(stream)).collect();
        // At once: a stream that waits for another one would be given up.
        std::thread::scope(|scope| {
            for (socket, bytes) in self.streams.iter_mut().zip(&bytes) {
                scope.spawn(move || socket.write_all(bytes).unwrap());
            }
        });
        let applied = AggregatorMessage::Applied { round: 1, left_out: None };
        assert_eq!(self.next().unwrap(), applied);
    }

    /// With its data channels open, it does the rest as an honest client does.
    pub fn finish(&mut self) {
        self.await_request();
        self.announce_upload();
        for stream in 0..self.streams.len() {
            let bytes = self.bytes(stream);
            self.streams[stream].write_all(&bytes).unwrap();
        }
        self.confirm();
    }

    /// With all sent, it does the rest as an honest client does.
    pub fn confirm(&mut self) {
        let applied = AggregatorMessage::Applied { round: 1, left_out: None };
        assert_eq!(self.next().unwrap(), applied);
        self.take_model();
    }

    /// When the round is over, it does the rest as an honest client does.
    pub fn take_model(&mut self) {
        let digest = self.download();
        self.say(&ClientMessage::Received { round: 1, digest });
        assert_eq!(self.next().unwrap(), AggregatorMessage::Done);
        self.control.shutdown(Shutdown::Both).unwrap();
    }

    /// Asks for the whole model.
    pub fn want(&self) {
        for (stream, lane) in self.lanes().iter().enumerate() {
            let chunks = vec![ChunkRange::from(lane)];
            self.say(&ClientMessage::Want { stream: stream as u32, chunks });
        }
    }

    /// Takes the mean as an honest client does; gives its digest.
    pub fn download(&mut self) -> [u8; 32] {
        let message = self.next().unwrap();
        let AggregatorMessage::Download { round: 1, digest } = message else {
            panic!("{message:?} instead of the mean");
        };
        self.want();
        let mut sums = Vec::new();
        for stream in 0..self.streams.len() {
            assert!(matches!(self.next().unwrap(), AggregatorMessage::Sums { .. }));
            let mut bytes = self.bytes(stream);
            self.streams[stream].read_exact(&mut bytes).unwrap();
            let (chunks, lane) = (self.chunks(), self.lanes()[stream].clone());
            let start = chunks.bytes_of(&lane).start;
            sums.extend(lane.map(|index| {
                let range = chunks.get(index).bytes;
                chunk_sum(&bytes[(range.start - start) as usize..(range.end - start) as usize])
            }));
        }
        let layout = self.source.manifest().layout_digest();
        assert_eq!(model_digest(&layout, self.plan().chunk_bytes, &sums), digest);
        digest
    }
}
