//! A network between clients and an exchange, that can fail.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Forwards connections, until it breaks them.
pub struct Relay {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    sockets: Mutex<Vec<TcpStream>>,
    accepted: AtomicUsize,
    tampers: AtomicBool,
    closed: AtomicBool,
}

impl Relay {
    pub fn to(exchange: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let inside = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if inside.closed.load(Ordering::SeqCst) {
                    return;
                }
                inside.forward(client.unwrap(), TcpStream::connect(exchange).unwrap());
            }
        });
        Relay { address, shared }
    }

    /// Breaks all connections that there are.
    pub fn cut(&self) {
        for socket in self.shared.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Connections that came so far.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// From now on the name in a `Join` is changed on the way, or no more.
    pub fn tamper(&self, tampers: bool) {
        self.shared.tampers.store(tampers, Ordering::SeqCst);
    }
}

impl Shared {
    fn forward(self: &Arc<Self>, client: TcpStream, exchange: TcpStream) {
        let mut sockets = self.sockets.lock().unwrap();
        sockets.extend([client.try_clone().unwrap(), exchange.try_clone().unwrap()]);
        drop(sockets);
        self.accepted.fetch_add(1, Ordering::SeqCst);
        let (back, there) = (exchange.try_clone().unwrap(), client.try_clone().unwrap());
        let inside = self.clone();
        std::thread::spawn(move || copy(client, exchange, |bytes| inside.change(bytes)));
        std::thread::spawn(move || copy(back, there, |_| {}));
    }

    /// The clients here that are tampered with are called `client-...`.
    fn change(&self, bytes: &mut [u8]) {
        let found = bytes.windows(7).position(|window| window == b"client-");
        if let (true, Some(at)) = (self.tampers.load(Ordering::SeqCst), found) {
            bytes[at] = b'k';
        }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, change: impl Fn(&mut [u8])) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut bytes) {
        change(&mut bytes[..length]);
        if to.write_all(&bytes[..length]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        // Ends accept().
        let _ = TcpStream::connect(self.address);
        self.cut();
    }
}
