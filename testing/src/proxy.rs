//! The proxy: accepts connections and gives each two pumps.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use socket2::SockRef;

use crate::plan::{Channel, Direction, Fault, Kind, Plan, Scope, Then, Which};
use crate::pump;

/// How often everything here looks whether something has changed.
pub(crate) const TICK: Duration = Duration::from_millis(2);

/// How long a connection may take to say what it is.
const FIRST_BYTES: Duration = Duration::from_secs(2);

/// Bytes of a preamble, and where in it the channel stands.
const PREAMBLE_BYTES: usize = 12;
const CHANNEL_BYTE: usize = 10;

/// What is shared by all threads of a proxy.
pub(crate) struct Network {
    target: Mutex<SocketAddr>,
    plan: Plan,
    connections: Mutex<Vec<Arc<Connection>>>,
    fired: AtomicUsize,
    stalled: Stall,
    ended: AtomicBool,
}

/// Whether bytes move.
#[derive(Default)]
struct Stall(Mutex<Option<Option<Instant>>>);

impl Stall {
    fn begin(&self, time: Option<Duration>) {
        *locked(&self.0) = Some(time.map(|time| Instant::now() + time));
    }

    fn is_on(&self) -> bool {
        match *locked(&self.0) {
            None => false,
            Some(None) => true,
            Some(Some(until)) => Instant::now() < until,
        }
    }
}

/// One connection of a client, and the one that it became towards the aggregator.
pub(crate) struct Connection {
    channel: Mutex<Option<Channel>>,
    came: [AtomicU64; 2],
    went: [AtomicU64; 2],
    pieces: [AtomicU64; 2],
    stalled: Stall,
    is_over: AtomicBool,
    is_reset: AtomicBool,
    /// The aggregator's side stands.
    is_through: AtomicBool,
}

/// Both sockets of a connection. They close when both pumps have let go of them.
pub(crate) struct Pair {
    pub client: TcpStream,
    pub aggregator: TcpStream,
    connection: Arc<Connection>,
}

impl Drop for Pair {
    fn drop(&mut self) {
        for socket in [&self.client, &self.aggregator] {
            if self.connection.is_reset.load(SeqCst) {
                // Closing sends a reset then, and no farewell.
                let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
            } else {
                // Closing with unread bytes would send a reset alone.
                end_writing(socket);
            }
        }
    }
}

/// What one connection moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// What it carried.
    pub channel: Channel,
    /// Bytes that left the client.
    pub left_client: u64,
    /// Of these, bytes that were passed on to the aggregator.
    pub to_aggregator: u64,
    /// Bytes that left the aggregator.
    pub left_aggregator: u64,
    /// Of these, bytes that were passed on to the client.
    pub to_client: u64,
    /// Pieces in which bytes went to the aggregator.
    pub pieces_to_aggregator: u64,
}

/// A network between clients and their aggregator, which fails as planned. Dropped, it ends, and so do
/// its connections.
pub struct Proxy {
    address: SocketAddr,
    network: Arc<Network>,
}

impl Proxy {
    /// Listens on a port of the kernel's choice, and passes connections on to `target`.
    pub fn start(target: SocketAddr, plan: Plan) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port of the loopback");
        let address = listener.local_addr().expect("a bound socket has an address");
        listener.set_nonblocking(true).expect("a new socket obeys");
        let network = Arc::new(Network {
            target: Mutex::new(target),
            plan,
            connections: Mutex::default(),
            fired: AtomicUsize::new(0),
            stalled: Stall::default(),
            ended: AtomicBool::new(false),
        });
        let inside = network.clone();
        std::thread::spawn(move || accept_all(listener, &inside));
        Proxy { address, network }
    }

    /// Where clients dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on connections go there: an aggregator that began again has another port.
    pub fn set_target(&self, target: SocketAddr) {
        *locked(&self.network.target) = target;
    }

    /// How many faults have happened.
    pub fn fired(&self) -> usize {
        self.network.fired.load(SeqCst)
    }

    /// What each connection has moved so far, in the order in which they came.
    pub fn traffic(&self) -> Vec<Traffic> {
        let connections = locked(&self.network.connections);
        connections.iter().map(|connection| connection.traffic()).collect()
    }

    /// Bytes that were passed on in this direction, by all connections of this kind.
    pub fn passed(&self, channel: Channel, direction: Direction) -> u64 {
        let all = self.traffic().into_iter().filter(|traffic| traffic.channel == channel);
        all.map(|traffic| match direction {
            Direction::Up => traffic.to_aggregator,
            Direction::Down => traffic.to_client,
        })
        .sum()
    }

    /// Ends all connections that there are.
    pub fn cut(&self) {
        self.network.each(|connection| connection.end(false));
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.network.ended.store(true, SeqCst);
        self.cut();
    }
}

impl Network {
    fn each(&self, act: impl Fn(&Connection)) {
        locked(&self.connections).iter().for_each(|connection| act(connection));
    }

    /// Whether this connection may move bytes now. Waits until it may; false when it is over.
    pub(crate) fn await_turn(&self, connection: &Connection) -> bool {
        while !connection.is_over() {
            if !self.stalled.is_on() && !connection.stalled.is_on() {
                return true;
            }
            std::thread::sleep(TICK);
        }
        false
    }

    /// Notes that a fault happens.
    pub(crate) fn fire(&self, fault: &Fault) {
        if !matches!(fault.kind, Kind::Call(_)) {
            self.fired.fetch_add(1, SeqCst);
        }
    }

    pub(crate) fn end(&self, connection: &Connection, scope: Scope, is_reset: bool) {
        match scope {
            Scope::Connection => connection.end(is_reset),
            Scope::All => self.each(|connection| connection.end(is_reset)),
        }
    }

    pub(crate) fn stall(&self, connection: &Connection, scope: Scope, time: Option<Duration>) {
        match scope {
            Scope::Connection => connection.stalled.begin(time),
            Scope::All => self.stalled.begin(time),
        }
    }

    fn fate(&self) -> Then {
        if self.fired.load(SeqCst) == 0 { Then::Open } else { self.plan.then }
    }

    /// The faults of the connection that came as number `index`.
    fn faults(&self, index: usize) -> Vec<Fault> {
        let connections = locked(&self.connections);
        let channel = connections[index].channel();
        let earlier =
            |wanted| connections[..index].iter().filter(|other| other.channel() == wanted).count();
        let is_meant = |which: Which| match which {
            Which::Nth(number) => number == index,
            Which::Control(number) => {
                channel == Channel::Control && number == earlier(Channel::Control)
            }
            Which::Data(number) => channel == Channel::Data && number == earlier(Channel::Data),
        };
        self.plan.faults.iter().filter(|fault| is_meant(fault.which)).cloned().collect()
    }

    /// Waits until another connection has gone through that came after this one.
    fn hold(&self, index: usize, limit: Duration) {
        let until = Instant::now() + limit;
        let other_is_through =
            || locked(&self.connections)[index + 1..].iter().any(|c| c.is_through.load(SeqCst));
        while !other_is_through() && Instant::now() < until && !self.ended.load(SeqCst) {
            std::thread::sleep(TICK);
        }
    }
}

impl Connection {
    fn new() -> Connection {
        Connection {
            channel: Mutex::new(None),
            came: Default::default(),
            went: Default::default(),
            pieces: Default::default(),
            stalled: Stall::default(),
            is_over: AtomicBool::new(false),
            is_reset: AtomicBool::new(false),
            is_through: AtomicBool::new(false),
        }
    }

    fn channel(&self) -> Channel {
        locked(&self.channel).unwrap_or(Channel::Other)
    }

    fn traffic(&self) -> Traffic {
        let [left_client, left_aggregator] = [0, 1].map(|way| self.came[way].load(SeqCst));
        let [to_aggregator, to_client] = [0, 1].map(|way| self.went[way].load(SeqCst));
        let channel = self.channel();
        let pieces_to_aggregator = self.pieces[Direction::Up as usize].load(SeqCst);
        Traffic {
            channel,
            left_client,
            to_aggregator,
            left_aggregator,
            to_client,
            pieces_to_aggregator,
        }
    }

    pub(crate) fn came(&self, direction: Direction, bytes: usize) {
        self.came[direction as usize].fetch_add(bytes as u64, SeqCst);
    }

    pub(crate) fn went(&self, direction: Direction, bytes: usize) {
        self.pieces[direction as usize].fetch_add(1, SeqCst);
        self.went[direction as usize].fetch_add(bytes as u64, SeqCst);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(SeqCst)
    }

    pub(crate) fn end(&self, is_reset: bool) {
        // The first end counts.
        if !self.is_over() {
            self.is_reset.store(is_reset, SeqCst);
            self.is_over.store(true, SeqCst);
        }
    }
}

fn accept_all(listener: TcpListener, network: &Arc<Network>) {
    while !network.ended.load(SeqCst) && network.fate() != Then::Refuse {
        match listener.accept() {
            Ok((client, _)) => {
                let connection = Arc::new(Connection::new());
                let index = {
                    let mut connections = locked(&network.connections);
                    connections.push(connection.clone());
                    connections.len() - 1
                };
                if network.fate() == Then::Silent {
                    connection.stalled.begin(None);
                }
                let inside = network.clone();
                std::thread::spawn(move || pass_on(client, index, &connection, &inside));
            }
            Err(_) => std::thread::sleep(TICK),
        }
    }
}

fn pass_on(client: TcpStream, index: usize, connection: &Arc<Connection>, network: &Arc<Network>) {
    // The listener does not wait, and on some systems its connections do not either.
    let settled = client.set_nonblocking(false).and_then(|()| client.set_nodelay(true));
    let channel = settled.and_then(|()| find_channel(&client, connection, network));
    *locked(&connection.channel) = Some(channel.unwrap_or(Channel::Other));
    let faults = network.faults(index);
    for fault in &faults {
        if let Kind::Hold(limit) = fault.kind {
            network.fire(fault);
            network.hold(index, limit);
        }
    }
    if !network.await_turn(connection) {
        return;
    }
    let target = *locked(&network.target);
    let Ok(aggregator) = TcpStream::connect(target) else {
        return;
    };
    // Fails on a connection that has ended, and then so do the pumps.
    let _ = aggregator.set_nodelay(true);
    connection.is_through.store(true, SeqCst);
    let pair = Arc::new(Pair { client, aggregator, connection: connection.clone() });
    for direction in [Direction::Up, Direction::Down] {
        let mut faults: Vec<Fault> =
            faults.iter().filter(|fault| fault.direction == direction).cloned().collect();
        faults.sort_by_key(|fault| fault.at_byte);
        let (pair, connection, network) = (pair.clone(), connection.clone(), network.clone());
        std::thread::spawn(move || pump::run(&pair, direction, faults, &connection, &network));
    }
}

/// What the first bytes say; they stay in the socket.
fn find_channel(
    client: &TcpStream,
    connection: &Connection,
    network: &Network,
) -> io::Result<Channel> {
    let mut bytes = [0; PREAMBLE_BYTES];
    let until = Instant::now() + FIRST_BYTES;
    client.set_read_timeout(Some(TICK))?;
    while Instant::now() < until && !connection.is_over() && !network.ended.load(SeqCst) {
        match client.peek(&mut bytes) {
            Ok(0) => break,
            Ok(PREAMBLE_BYTES) if bytes.starts_with(b"fedlane\0") => {
                return Ok(match bytes[CHANNEL_BYTE] {
                    1 => Channel::Control,
                    2 => Channel::Data,
                    _ => Channel::Other,
                });
            }
            Ok(PREAMBLE_BYTES) => break,
            // More may come.
            Ok(_) => std::thread::sleep(TICK),
            Err(error) if is_early(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Channel::Other)
}

/// Whether nothing has come yet.
pub(crate) fn is_early(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

/// Ends one direction of a socket.
pub(crate) fn end_writing(socket: &TcpStream) {
    // Fails where the other side has ended the connection already.
    let _ = socket.shutdown(Shutdown::Write);
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
