//! A control message in its frame: a length of four bytes, little-endian, and the message in
//! postcard's encoding.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::WireError;
use crate::limits;

/// Bytes of the length.
pub const LENGTH_BYTES: usize = 4;

/// The message with its length in front.
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
