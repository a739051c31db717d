//! The keys of one control channel: made of the secret and of a random number from each side, so that
//! they are never the same twice.

use super::hello::{Nonce, Proof, Secret, Ticket, is_same};

/// Who seals a message, so that none can be sent back to where it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Whoever dials.
    Client,
    /// Whoever listens.
    Aggregator,
}

/// All keys of a control channel.
pub struct ControlKeys {
    base: [u8; 32],
}

impl ControlKeys {
    /// Both sides must agree on all three. Without a secret ([`Secret::OPEN`]) everybody who hears the
    /// nonces can do the same: then proofs and seals find accidents, and no attacker.
    pub fn new(secret: &Secret, client: &Nonce, aggregator: &Nonce) -> ControlKeys {
        let mut hasher = blake3::Hasher::new_derive_key("fedlane 2026 control channel");
        hasher.update(secret.bytes()).update(client).update(aggregator);
        ControlKeys { base: *hasher.finalize().as_bytes() }
    }

    fn part(&self, label: &str) -> [u8; 32] {
        *blake3::keyed_hash(&self.base, label.as_bytes()).as_bytes()
    }

    /// Shows that the aggregator knows the secret.
    pub fn aggregator_proof(&self) -> Proof {
        self.part("the aggregator knows")
    }

    /// Shows that the client knows the secret.
    pub fn client_proof(&self) -> Proof {
        self.part("the client knows")
    }

    /// Whether `proof` is that of the aggregator. Takes the same time whatever differs.
    pub fn is_aggregator(&self, proof: &Proof) -> bool {
        is_same(&self.aggregator_proof(), proof)
    }

    /// Whether `proof` is that of the client. Takes the same time whatever differs.
    pub fn is_client(&self, proof: &Proof) -> bool {
        is_same(&self.client_proof(), proof)
    }

    /// What the messages of one side are sealed with.
    pub fn seal(&self, side: Side) -> super::frame::Seal {
        super::frame::Seal::new(self.part(match side {
            Side::Client => "from the client",
            Side::Aggregator => "from the aggregator",
        }))
    }

    /// What makes tickets of this control channel.
    pub fn binding(&self) -> Binding {
        Binding(self.part("data channels"))
    }
}

/// Ties data channels to their control channel: a ticket alone opens nothing.
#[derive(Clone, Copy)]
pub struct Binding([u8; 32]);

impl Binding {
    /// The key of the hellos that go with this ticket.
    pub fn key(&self, ticket: &Ticket) -> Ticket {
        *blake3::keyed_hash(&self.0, ticket).as_bytes()
    }

    /// Hides a key for one attempt of one round, or shows it again: in a ring, keys are made by one client
    /// and used by another, and nobody between them and the aggregator shall have them. `side` is who
    /// says it.
    pub fn veil(&self, side: Side, round: u32, attempt: u32, key: &Ticket) -> Ticket {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(match side {
            Side::Client => b"a key from the client",
            Side::Aggregator => b"a key for the client.",
        });
        hasher.update(&round.to_le_bytes()).update(&attempt.to_le_bytes());
        let mut veiled = *hasher.finalize().as_bytes();
        veiled.iter_mut().zip(key).for_each(|(veil, byte)| *veil ^= byte);
        veiled
    }
}
