//! Accepts connections, finds out what each one is, and lets in those that may. A stranger costs
//! one thread for a few seconds and can end nothing. How many there may be is in [`limits`].

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::entry::refuse;
use super::event::{Event, Joined};
use crate::channel::DataChannel;
use crate::control::{self, Congestion, ControlChannel, printable};
use crate::error::{ControlError, DoorError};
use crate::lane::ConnectionId;
use crate::limits;
use crate::link::Link;
use crate::quota::{Quota, Share};
use crate::tls::{ServerTls, Tls};
use crate::wire::hello::{
    Answer, Channel, DataAnswer, DataHello, Place, Preamble, Secret, SessionId, Ticket,
};
use crate::wire::message::ClientMessage;

/// Who may open data channels of a session, and who wants to know.
pub(crate) struct Tickets {
    pub clients: HashMap<u32, Pass>,
    pub events: Sender<Event>,
}

/// What lets the data channels of one client's connection in.
pub(crate) struct Pass {
    /// The key of their hellos.
    pub key: Ticket,
    /// The connection.
    pub connection: ConnectionId,
    /// Which streams are open already.
    pub taken: Vec<bool>,
    /// Until when they may come.
    pub expiry: Expiry,
}

/// When tickets that have not been used are worth nothing any more.
pub(crate) struct Expiry {
    lifetime: Duration,
    until: Instant,
}

impl Expiry {
    /// After `lifetime` in which no stream was admitted: each one that is, is progress.
    pub fn after(lifetime: Duration) -> Expiry {
        Expiry { lifetime, until: Instant::now() + lifetime }
    }

    fn renew(&mut self) {
        self.until = Instant::now() + self.lifetime;
    }

    fn is_over(&self) -> bool {
        Instant::now() > self.until
    }
}

/// Finds the secret of a place, if there is that place.
type Find = dyn Fn(&Place) -> Option<Secret> + Send + Sync;

/// Who is behind a door.
pub(crate) struct Reception {
    /// The secret of a place, if there is that place.
    pub secret: Box<Find>,
    /// Takes everyone who has said what he comes for.
    pub welcome: Box<dyn Fn(Visit) + Send + Sync>,
}

/// Somebody with a control channel.
pub(crate) enum Visit {
    /// Wants to join.
    Join(Box<Joined>),
    /// Only asks whether he could.
    Call { channel: ControlChannel, name: String, place: Place },
}

/// What the handshake threads share.
struct Hall {
    sessions: Mutex<HashMap<SessionId, Tickets>>,
    reception: Reception,
    tls: Option<ServerTls>,
    congestion: Congestion,
    visitors: Mutex<Visitors>,
    closed: AtomicBool,
    threads: Arc<Quota>,
    /// Bytes of first messages that are being read.
    held_bytes: Arc<Quota>,
    complaints: Mutex<Complaints>,
}

impl Hall {
    fn visitors(&self) -> MutexGuard<'_, Visitors> {
        self.visitors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs something about a visitor, unless much is logged already: a flood shall not fill a disk.
    fn complain(&self, complaint: std::fmt::Arguments<'_>) {
        let mut complaints = self.complaints.lock().unwrap_or_else(PoisonError::into_inner);
        let (may, passed_over) = complaints.count(Instant::now());
        drop(complaints);
        if passed_over > 0 {
            tracing::warn!("{passed_over} more visitors were sent away, or left");
        }
        if may {
            tracing::warn!("{complaint}");
        }
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<SessionId, Tickets>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The listening side of an aggregator: one port, for any number of sessions.
pub(crate) struct Door {
    hall: Arc<Hall>,
    listener: Arc<TcpListener>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// Starts to accept connections. At most `visitors` may be about to say who they are.
    pub fn open(
        listener: TcpListener,
        congestion: Congestion,
        tls: Option<ServerTls>,
        visitors: usize,
        reception: Reception,
    ) -> io::Result<Door> {
        let hall = Arc::new(Hall {
            sessions: Mutex::default(),
            reception,
            tls,
            congestion,
            visitors: Mutex::new(Visitors::new(visitors)),
            closed: AtomicBool::new(false),
            threads: Quota::new(limits::MAX_VISITOR_THREADS.min(2 * visitors as u64)),
            held_bytes: Quota::new(limits::MAX_VISITORS_BYTES),
            complaints: Mutex::default(),
        });
        let listener = Arc::new(listener);
        let (inside, accepting) = (hall.clone(), listener.clone());
        let thread = std::thread::Builder::new()
            .name("door".into())
            .spawn(move || accept_all(&accepting, &inside))?;
        Ok(Door { hall, listener, thread: Some(thread) })
    }

    /// From now on data channels of this session with these tickets are let in.
    pub fn admit(&self, session: SessionId, tickets: Tickets) {
        self.hall.sessions().insert(session, tickets);
    }

    /// A client of this session has a new connection; data channels of the old one stay out.
    pub fn readmit(&self, session: SessionId, client: u32, pass: Pass) {
        if let Some(tickets) = self.hall.sessions().get_mut(&session) {
            tickets.clients.insert(client, pass);
        }
    }

    /// The session is over.
    pub fn dismiss(&self, session: &SessionId) {
        self.hall.sessions().remove(session);
    }

    /// Lets nobody in any more. Who is in stays.
    pub fn close(&self) {
        self.hall.closed.store(true, Ordering::SeqCst);
        // On Linux this ends accept(), and frees the port.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic, and there is nobody to tell.
            let _ = thread.join();
        }
        for (_, visitor) in self.hall.visitors().waiting.values() {
            // Fails where the visitor has left already.
            let _ = visitor.shutdown(Shutdown::Both);
        }
    }
}

fn accept_all(listener: &TcpListener, hall: &Arc<Hall>) {
    for socket in listener.incoming() {
        if hall.closed.load(Ordering::SeqCst) {
            return;
        }
        match socket {
            Ok(socket) => receive_visitor(socket, hall),
            Err(error) => {
                hall.complain(format_args!("a connection could not be accepted: {error}"));
                // Out of descriptors, most likely: trying again at once would spin.
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Serves a visitor on a thread of its own. Too many make one of the oldest leave: whoever means well
/// says at once who it is, and so is never among them for long.
fn receive_visitor(socket: TcpStream, hall: &Arc<Hall>) {
    let entered = hall.visitors().enter(&socket);
    let number = match entered {
        Ok(number) => number,
        Err(error) => {
            return hall.complain(format_args!("a connection could not be served: {error}"));
        }
    };
    let thread = await_thread(hall);
    let inside = hall.clone();
    let spawned = std::thread::Builder::new().name("visitor".into()).spawn(move || {
        let peer = socket.peer_addr().map_or_else(|_| "a peer that left".into(), |a| a.to_string());
        let welcomed = welcome(socket, &inside);
        let stayed = inside.visitors().leave(number);
        drop(thread);
        match welcomed {
            // Its session goes on also when nobody else is let in. Nobody listens any more when the
            // session has ended; the socket then closes.
            Ok(Visitor::Stream(events, event)) => drop(events.send(event)),
            // How the session ended is the last thing to say.
            _ if inside.closed.load(Ordering::SeqCst) => {}
            _ if !stayed => inside.complain(format_args!(
                "connection from {peer} closed: others came, and it had said nothing"
            )),
            Ok(Visitor::Client(visit)) => (inside.reception.welcome)(visit),
            Err(error) => {
                inside.complain(format_args!("connection from {peer} refused: {error}"));
            }
        }
    });
    if let Err(error) = spawned {
        hall.visitors().leave(number);
        hall.complain(format_args!("a connection could not be served: {error}"));
    }
}

/// Room for one more thread. Those that were made to leave end at once; who comes meanwhile waits in
/// the kernel.
fn await_thread(hall: &Hall) -> Share {
    loop {
        match hall.threads.take(1) {
            Some(thread) => return thread,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// How much was logged about visitors.
#[derive(Default)]
struct Complaints {
    since: Option<Instant>,
    logged: u32,
    passed_over: u64,
}

impl Complaints {
    /// Whether one more may be logged, and how many were not before it.
    fn count(&mut self, now: Instant) -> (bool, u64) {
        let mut passed_over = 0;
        let is_over = |since: Instant| now.duration_since(since) >= Duration::from_secs(1);
        if self.since.is_none_or(is_over) {
            passed_over = std::mem::take(&mut self.passed_over);
            (self.since, self.logged) = (Some(now), 0);
        }
        let may = self.logged < limits::MAX_COMPLAINTS;
        self.logged += u32::from(may);
        self.passed_over += u64::from(!may);
        (may, passed_over)
    }
}

/// Connections that have not said yet who they are, by the order in which they came.
struct Visitors {
    most: usize,
    next: u64,
    waiting: BTreeMap<u64, (IpAddr, TcpStream)>,
}

impl Visitors {
    fn new(most: usize) -> Visitors {
        Visitors { most, next: 0, waiting: BTreeMap::new() }
    }

    fn enter(&mut self, socket: &TcpStream) -> io::Result<u64> {
        let address = socket.peer_addr()?.ip();
        if self.waiting.len() >= self.most
            && let Some(number) = self.next_to_leave()
            && let Some((_, oldest)) = self.waiting.remove(&number)
        {
            // Fails where the visitor has left already.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        self.next += 1;
        self.waiting.insert(self.next, (address, socket.try_clone()?));
        Ok(self.next)
    }

    /// The oldest from the address that has the most: who floods the door pushes out himself.
    fn next_to_leave(&self) -> Option<u64> {
        let mut counts = HashMap::new();
        for (address, _) in self.waiting.values() {
            *counts.entry(*address).or_insert(0_usize) += 1;
        }
        let most = counts.values().copied().max()?;
        let crowd = |(_, (address, _)): &(&u64, &(IpAddr, TcpStream))| counts[address] == most;
        self.waiting.iter().find(crowd).map(|(number, _)| *number)
    }

    /// False if the visitor was made to leave before.
    fn leave(&mut self, number: u64) -> bool {
        self.waiting.remove(&number).is_some()
    }
}

/// Who came.
enum Visitor {
    Client(Visit),
    Stream(Sender<Event>, Event),
}

fn welcome(socket: TcpStream, hall: &Hall) -> Result<Visitor, DoorError> {
    // For all first bytes together: who sends them one by one wins no time.
    let until = Instant::now() + limits::HANDSHAKE;
    socket.set_write_timeout(Some(limits::HANDSHAKE))?;
    control::settle(&socket, &hall.congestion)?;
    let link = Link::accepted(socket, hall.tls.as_ref(), until)?;
    let preamble: Preamble = link.read_fixed(until)?;
    match preamble.dialled() {
        Ok(Channel::Control) => welcome_client(link, hall, until),
        Ok(Channel::Data) => welcome_stream(link, hall, until),
        Err(error) => {
            // So that a peer of another version can say what it met.
            let _ = link.write_fixed(&Preamble::new(Channel::Control));
            Err(ControlError::from(error).into())
        }
    }
}

fn welcome_client(link: Link, hall: &Hall, until: Instant) -> Result<Visitor, DoorError> {
    let address = link.peer_addr()?;
    let find = |place: &Place| match (hall.reception.secret)(place) {
        // A door that closes empties its places: a client would think that it is not wanted.
        None if hall.closed.load(Ordering::SeqCst) => Err(ControlError::Closed),
        found => Ok(found),
    };
    let accepted = ControlChannel::accept(link, find, until);
    let (mut channel, proven) = accepted.map_err(|error| match error {
        ControlError::NoPlace => DoorError::NoPlace,
        error => error.into(),
    })?;
    let bytes = channel.reader.read_length(limits::MAX_FRAME_BYTES)?;
    let room = room(&hall.held_bytes, bytes)?;
    // A long message may take longer, but not as long as it likes.
    channel.reader.set_end(until + Duration::from_secs(bytes / limits::SLOWEST_LINK_BYTES_S));
    let message = channel.reader.read_body(bytes)?;
    drop(room);
    channel.set_deadline(limits::HANDSHAKE)?;
    let is_edge = matches!(message, ClientMessage::JoinAsEdge { .. });
    let visit = match message {
        ClientMessage::Join { name, examples, header, place, resumes }
        | ClientMessage::JoinAsEdge { name, examples, header, place, resumes } => {
            check_place(place, proven)?;
            check_name(&channel, &name, hall)?;
            let name = printable(&name);
            Visit::Join(Box::new(Joined {
                channel,
                address,
                name,
                examples,
                header,
                place,
                resumes,
                rank: 0,
                is_edge,
                seat: None,
            }))
        }
        ClientMessage::Call { name, place } => {
            check_place(place, proven)?;
            Visit::Call { channel, name: printable(&name), place }
        }
        _ => return Err(DoorError::NoJoin),
    };
    Ok(Visitor::Client(visit))
}

/// Who knows the secret of one place may not ask for another.
fn check_place(asked: Place, proven: Place) -> Result<(), DoorError> {
    if asked == proven { Ok(()) } else { Err(DoorError::OtherPlace) }
}

/// A client may have only a name that is in its certificate, where it needs one.
fn check_name(channel: &ControlChannel, name: &str, hall: &Hall) -> Result<(), DoorError> {
    let names = channel.link().tls().and_then(Tls::names);
    if hall.tls.as_ref().is_none_or(|tls| tls.admits(name, names)) {
        return Ok(());
    }
    let error = DoorError::Name { name: printable(name) };
    refuse(channel, &error.to_string());
    Err(error)
}

/// Memory that a visitor's first message may take.
fn room(held_bytes: &Arc<Quota>, bytes: u64) -> Result<Share, DoorError> {
    // A usual message always has room, whatever strangers announce.
    match bytes > limits::USUAL_FRAME_BYTES {
        true => held_bytes.take(bytes).ok_or(DoorError::Crowded),
        false => Ok(held_bytes.take_anyway(bytes)),
    }
}

fn welcome_stream(link: Link, hall: &Hall, until: Instant) -> Result<Visitor, DoorError> {
    let hello: DataHello = link.read_fixed(until)?;
    let (events, connection, admission) = match check_ticket(&hello, hall) {
        Ok(admitted) => admitted,
        Err(answer) => {
            link.write_fixed(&Preamble::answering(Channel::Data, answer))?;
            return Err(DoorError::Ticket { answer: answer.text() });
        }
    };
    link.write_fixed(&admission)?;
    let channel = DataChannel::new(link)?;
    let stream = hello.stream();
    Ok(Visitor::Stream(events, Event::Stream { connection, stream, channel }))
}

/// Who waits for this stream, and what to answer, if it may come.
fn check_ticket(
    hello: &DataHello,
    hall: &Hall,
) -> Result<(Sender<Event>, ConnectionId, DataAnswer), Answer> {
    let mut sessions = hall.sessions();
    let tickets = sessions.get_mut(&hello.session()).ok_or(Answer::WrongTicket)?;
    let client = tickets.clients.get_mut(&hello.client());
    let Pass { key, connection, taken, expiry } = client.ok_or(Answer::WrongTicket)?;
    if !hello.is_admitted_by(&hello.session(), key) {
        return Err(Answer::WrongTicket);
    }
    let taken = taken.get_mut(hello.stream() as usize).ok_or(Answer::WrongTicket)?;
    if *taken {
        return Err(Answer::Taken);
    }
    if expiry.is_over() {
        return Err(Answer::Expired);
    }
    *taken = true;
    expiry.renew();
    Ok((tickets.events.clone(), *connection, hello.admission(key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(address: [u8; 4], listener: &TcpListener) -> TcpStream {
        use socket2::{Domain, Socket, Type};
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&std::net::SocketAddr::from((address, 0)).into()).unwrap();
        socket.connect(&listener.local_addr().unwrap().into()).unwrap();
        socket.into()
    }

    #[test]
    fn who_floods_the_door_pushes_out_himself() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut visitors = Visitors::new(limits::MAX_VISITORS);
        let mut held = Vec::new();
        let mut enter = |address| {
            held.push(from(address, &listener));
            let (socket, _) = listener.accept().unwrap();
            visitors.enter(&socket).unwrap()
        };
        let first = enter([127, 0, 0, 2]);
        let flood: Vec<u64> = (0..limits::MAX_VISITORS).map(|_| enter([127, 0, 0, 3])).collect();
        let second = enter([127, 0, 0, 4]);
        assert!(!visitors.leave(flood[0]) && !visitors.leave(flood[1]));
        assert!(visitors.leave(first) && visitors.leave(second) && visitors.leave(flood[2]));
    }

    #[test]
    fn a_flood_of_complaints_is_counted_only() {
        let (mut complaints, begin) = (Complaints::default(), Instant::now());
        let count =
            |complaints: &mut Complaints, ms| complaints.count(begin + Duration::from_millis(ms));
        let logged = (0..1000).filter(|ms| count(&mut complaints, ms % 500).0).count();
        assert_eq!(logged, limits::MAX_COMPLAINTS as usize);
        assert_eq!(count(&mut complaints, 1000), (true, 1000 - logged as u64));
        assert_eq!(count(&mut complaints, 1001), (true, 0));
    }
}
