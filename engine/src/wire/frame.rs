//! A control message in its frame: a length of four bytes, little-endian, and the message in
//! postcard's encoding, each with a seal behind it.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::WireError;
use crate::limits;

/// Bytes of the length.
pub const LENGTH_BYTES: usize = 4;

/// Bytes of a seal.
pub const SEAL_BYTES: usize = 16;

/// Bytes in front of a message: its length and the seal of that.
pub const HEAD_BYTES: usize = LENGTH_BYTES + SEAL_BYTES;

/// The message with its length in front, without seals.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, WireError> {
    let mut frame = postcard::to_extend(message, vec![0; LENGTH_BYTES])
        .map_err(|error| WireError::Encode { error: error.to_string() })?;
    let bytes = frame.len() - LENGTH_BYTES;
    check_length(bytes as u64, limits::MAX_FRAME_BYTES)?;
    frame[..LENGTH_BYTES].copy_from_slice(&(bytes as u32).to_le_bytes());
    Ok(frame)
}

/// How many bytes follow the length, if that is at most `limit`.
pub fn length(prefix: [u8; LENGTH_BYTES], limit: u64) -> Result<u64, WireError> {
    let bytes = u64::from(u32::from_le_bytes(prefix));
    check_length(bytes, limit)?;
    Ok(bytes)
}

/// Reads the message from the bytes behind the length; all of them must belong to it.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(WireError::Trailing { bytes: rest.len() }),
        Err(error) => Err(WireError::Decode { error: error.to_string() }),
    }
}

fn check_length(bytes: u64, limit: u64) -> Result<(), WireError> {
    if bytes > limit { Err(WireError::TooLong { bytes, limit }) } else { Ok(()) }
}

/// Seals the messages of one direction of a control channel, or checks their seals. It counts, so that
/// none can be left out, repeated or moved.
pub struct Seal {
    key: [u8; 32],
    count: u64,
}

/// What a seal is for.
#[derive(Clone, Copy)]
enum Part {
    Length = 0,
    Message = 1,
}

impl Seal {
    /// Of a direction that has said nothing yet.
    pub fn new(key: [u8; 32]) -> Seal {
        Seal { key, count: 0 }
    }

    /// The next message as it travels, from [`encode`].
    pub fn close(&mut self, frame: &[u8]) -> Vec<u8> {
        let (length, message) = frame.split_at(LENGTH_BYTES);
        let mut sealed = Vec::with_capacity(frame.len() + 2 * SEAL_BYTES);
        sealed.extend(length);
        sealed.extend(self.mac(Part::Length, length));
        sealed.extend(message);
        sealed.extend(self.mac(Part::Message, message));
        self.count += 1;
        sealed
    }

    /// How many bytes the next message has, without its seal: at most `limit`. The length is sealed
    /// too, so that nobody waits for bytes that nobody sends.
    pub fn open_head(&self, head: &[u8; HEAD_BYTES], limit: u64) -> Result<u64, WireError> {
        let (length, seal) = head.split_at(LENGTH_BYTES);
        self.check(Part::Length, length, seal)?;
        self::length([head[0], head[1], head[2], head[3]], limit)
    }

    /// The message in the bytes behind the head.
    pub fn open_message<'a>(&mut self, sealed: &'a [u8]) -> Result<&'a [u8], WireError> {
        let (message, seal) = sealed
            .split_at_checked(sealed.len().saturating_sub(SEAL_BYTES))
            .ok_or(WireError::Seal)?;
        self.check(Part::Message, message, seal)?;
        self.count += 1;
        Ok(message)
    }

    fn check(&self, part: Part, bytes: &[u8], seal: &[u8]) -> Result<(), WireError> {
        let is_right = constant_time_eq(&self.mac(part, bytes), seal);
        if is_right { Ok(()) } else { Err(WireError::Seal) }
    }

    /// The first bytes of BLAKE3, keyed, over the message's number, what is sealed, and that.
    fn mac(&self, part: Part, bytes: &[u8]) -> [u8; SEAL_BYTES] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&self.count.to_le_bytes()).update(&[part as u8]).update(bytes);
        let mut seal = [0; SEAL_BYTES];
        hasher.finalize_xof().fill(&mut seal);
        seal
    }
}

/// Takes the same time whatever differs.
fn constant_time_eq(expected: &[u8; SEAL_BYTES], found: &[u8]) -> bool {
    let Ok(found) = <[u8; SEAL_BYTES]>::try_from(found) else { return false };
    let wide = |short: &[u8; SEAL_BYTES]| {
        let mut wide = [0; 32];
        wide[..SEAL_BYTES].copy_from_slice(short);
        // blake3::Hash compares in constant time.
        blake3::Hash::from(wide)
    };
    wide(expected) == wide(&found)
}
