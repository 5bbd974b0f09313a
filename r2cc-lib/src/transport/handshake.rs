//! Each connection proves knowledge of the job's key, and says what it is for, before it may carry data.
//!
//! Challenge (acceptor), hello (connector), welcome (acceptor): both sides authenticate the other's nonce
//! and every field with HMAC-SHA-256. No I/O here: fixed-size messages in, fixed-size messages out.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::repair::{Generation, Lane, PathId};

const MAGIC: [u8; 4] = *b"R2CC";
/// Version of everything that goes over a connection.
pub const PROTOCOL_VERSION: u16 = 1;
const NONCE_BYTES: usize = 16;
const MAC_BYTES: usize = 32;
/// Length of the acceptor's first message.
pub const CHALLENGE_BYTES: usize = 6 + NONCE_BYTES;
const FIELD_BYTES: usize = 15;
/// Length of the connector's message.
pub const HELLO_BYTES: usize = 6 + FIELD_BYTES + NONCE_BYTES + MAC_BYTES;
/// Length of the acceptor's second message.
pub const WELCOME_BYTES: usize = MAC_BYTES;

/// A secret shared by the ranks of a job.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// HMAC-SHA-256 of label and context under `secret`.
    pub fn derive(secret: &[u8], label: &str, context: &[u8]) -> Self {
        Self(mac(secret, label, &[context]))
    }
}

fn mac(key: &[u8], label: &str, parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = keyed(key, label);
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

fn keyed(key: &[u8], label: &str) -> Hmac<Sha256> {
    // HMAC takes a key of any length.
    #[allow(clippy::expect_used)]
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC accepts every key length");
    mac.update(&(label.len() as u32).to_le_bytes());
    mac.update(label.as_bytes());
    mac
}

/// Fresh random bytes.
///
/// # Errors
/// If the system has no randomness to give.
pub fn nonce() -> std::io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(std::io::Error::other)?;
    Ok(nonce)
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Control messages between a rank and rank 0.
    Control,
    /// A lane of a link.
    Data(Lane),
}

/// What the two ends of a link call it: numbers of ranks in the native engine, drawn at random elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkName {
    /// The connecting end.
    pub from: u32,
    /// The accepting end.
    pub to: u32,
}

/// Who connects, to whom, for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The two ends.
    pub name: LinkName,
    /// What for.
    pub purpose: Purpose,
}

impl Hello {
    fn encode(&self) -> [u8; FIELD_BYTES] {
        let (kind, lane) = match self.purpose {
            Purpose::Control => (0, Lane { path: PathId(0), generation: Generation(0) }),
            Purpose::Data(lane) => (1, lane),
        };
        let mut out = [0; FIELD_BYTES];
        out[0] = kind;
        out[1..5].copy_from_slice(&self.name.from.to_le_bytes());
        out[5..9].copy_from_slice(&self.name.to.to_le_bytes());
        out[9..11].copy_from_slice(&lane.path.0.to_le_bytes());
        out[11..15].copy_from_slice(&lane.generation.0.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let path = PathId(u16::from_le_bytes(bytes.get(9..11)?.try_into().ok()?));
        let lane = Lane { path, generation: Generation(word(11)?) };
        let purpose = match bytes.first()? {
            0 => Purpose::Control,
            1 => Purpose::Data(lane),
            _ => return None,
        };
        Some(Self { name: LinkName { from: word(1)?, to: word(5)? }, purpose })
    }
}

/// Why a connection was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The bytes are no handshake.
    #[error("the other side does not speak this protocol")]
    NotR2cc,
    /// Another protocol version.
    #[error("protocol version {theirs}, this side has {ours}; hint: use the same release on every node")]
    Version {
        /// Their version.
        theirs: u16,
        /// Our version.
        ours: u16,
    },
    /// The proof is wrong.
    #[error("wrong job secret; hint: every rank needs the same secret")]
    Secret,
    /// A link that is not here, or not any more.
    #[error("no link {0:?} ends here")]
    Unknown(LinkName),
    /// Unknown purpose.
    #[error("unknown purpose of a connection")]
    Purpose,
}

fn read_head(bytes: &[u8]) -> Result<(), HandshakeError> {
    if bytes[..4] != MAGIC {
        return Err(HandshakeError::NotR2cc);
    }
    let theirs = u16::from_le_bytes([bytes[4], bytes[5]]);
    if theirs != PROTOCOL_VERSION {
        return Err(HandshakeError::Version { theirs, ours: PROTOCOL_VERSION });
    }
    Ok(())
}

fn head(out: &mut [u8]) {
    out[..4].copy_from_slice(&MAGIC);
    out[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
}

/// The accepting side.
#[derive(Debug)]
pub struct Acceptor {
    nonce: [u8; NONCE_BYTES],
}

impl Acceptor {
    /// A connection came in.
    ///
    /// # Errors
    /// If the system has no randomness to give.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { nonce: nonce()? })
    }

    /// First message.
    pub fn challenge(&self) -> [u8; CHALLENGE_BYTES] {
        let mut out = [0; CHALLENGE_BYTES];
        head(&mut out);
        out[6..].copy_from_slice(&self.nonce);
        out
    }

    /// Reads the connector's message; returns what it wants and the answer. `key_of` is asked for the key of the
    /// link that the connector names, before its proof is checked.
    ///
    /// # Errors
    /// If the connector is not one of us.
    pub fn handle_hello(
        &self,
        bytes: &[u8; HELLO_BYTES],
        key_of: impl FnOnce(LinkName) -> Option<Key>,
    ) -> Result<(Hello, [u8; WELCOME_BYTES]), HandshakeError> {
        read_head(bytes)?;
        let (body, proof) = bytes.split_at(HELLO_BYTES - MAC_BYTES);
        let hello = Hello::decode(&body[6..6 + FIELD_BYTES]).ok_or(HandshakeError::Purpose)?;
        let key = key_of(hello.name).ok_or(HandshakeError::Unknown(hello.name))?;
        let mut expected = keyed(&key.0, "hello");
        expected.update(&self.nonce);
        expected.update(body);
        expected.verify_slice(proof).map_err(|_| HandshakeError::Secret)?;
        Ok((hello, mac(&key.0, "welcome", &[&self.nonce, body])))
    }
}

/// The connecting side.
#[derive(Debug)]
pub struct Connector {
    key: Key,
    hello: Hello,
    transcript: Option<Vec<u8>>,
}

impl Connector {
    /// A connection for `hello`.
    pub fn new(key: Key, hello: Hello) -> Self {
        Self { key, hello, transcript: None }
    }

    /// Reads the challenge; returns the answer.
    ///
    /// # Errors
    /// If the acceptor does not speak this protocol.
    pub fn handle_challenge(&mut self, bytes: &[u8; CHALLENGE_BYTES]) -> Result<[u8; HELLO_BYTES], HandshakeError> {
        read_head(bytes)?;
        let theirs = &bytes[6..];
        let mut out = [0; HELLO_BYTES];
        head(&mut out);
        out[6..6 + FIELD_BYTES].copy_from_slice(&self.hello.encode());
        let ours = nonce().map_err(|_| HandshakeError::Secret)?;
        out[6 + FIELD_BYTES..6 + FIELD_BYTES + NONCE_BYTES].copy_from_slice(&ours);
        let body = HELLO_BYTES - MAC_BYTES;
        let proof = mac(&self.key.0, "hello", &[theirs, &out[..body]]);
        out[body..].copy_from_slice(&proof);
        self.transcript = Some([theirs, &out[..body]].concat());
        Ok(out)
    }

    /// Reads the acceptor's proof.
    ///
    /// # Errors
    /// If the acceptor does not know the key.
    pub fn handle_welcome(&self, bytes: &[u8; WELCOME_BYTES]) -> Result<(), HandshakeError> {
        let transcript = self.transcript.as_ref().ok_or(HandshakeError::NotR2cc)?;
        let mut expected = keyed(&self.key.0, "welcome");
        expected.update(transcript);
        expected.verify_slice(bytes).map_err(|_| HandshakeError::Secret)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane_hello() -> Hello {
        let lane = Lane { path: PathId(2), generation: Generation(7) };
        Hello { name: LinkName { from: 3, to: 5 }, purpose: Purpose::Data(lane) }
    }

    #[test]
    fn both_sides_agree_with_the_same_key() {
        let key = Key::derive(b"secret", "job", b"1");
        let acceptor = Acceptor::new().unwrap();
        let mut connector = Connector::new(key.clone(), lane_hello());
        let hello = connector.handle_challenge(&acceptor.challenge()).unwrap();
        let (seen, welcome) = acceptor.handle_hello(&hello, |_| Some(key)).unwrap();
        assert_eq!(seen, lane_hello());
        connector.handle_welcome(&welcome).unwrap();
    }

    #[test]
    fn another_key_a_changed_field_or_a_replayed_hello_is_refused() {
        let key = Key::derive(b"secret", "job", b"1");
        let acceptor = Acceptor::new().unwrap();
        let known = |name| (name == lane_hello().name).then(|| key.clone());
        let mut stranger = Connector::new(Key::derive(b"other", "job", b"1"), lane_hello());
        let hello = stranger.handle_challenge(&acceptor.challenge()).unwrap();
        assert_eq!(acceptor.handle_hello(&hello, known).unwrap_err(), HandshakeError::Secret);
        let mut friend = Connector::new(key.clone(), lane_hello());
        let good = friend.handle_challenge(&acceptor.challenge()).unwrap();
        let mut changed = good;
        changed[8] ^= 1;
        assert_eq!(acceptor.handle_hello(&changed, |_| known(lane_hello().name)).unwrap_err(), HandshakeError::Secret);
        assert!(matches!(acceptor.handle_hello(&changed, known), Err(HandshakeError::Unknown(_))));
        let later = Acceptor::new().unwrap();
        assert_eq!(later.handle_hello(&good, known).unwrap_err(), HandshakeError::Secret);
        assert_eq!(friend.handle_welcome(&[0; 32]).unwrap_err(), HandshakeError::Secret);
    }

    #[test]
    fn garbage_and_other_versions_are_named() {
        let acceptor = Acceptor::new().unwrap();
        assert_eq!(acceptor.handle_hello(&[0x47; HELLO_BYTES], |_| None).unwrap_err(), HandshakeError::NotR2cc);
        let mut old = [0; HELLO_BYTES];
        head(&mut old);
        old[4] = 9;
        assert_eq!(acceptor.handle_hello(&old, |_| None).unwrap_err(), HandshakeError::Version { theirs: 9, ours: 1 });
    }
}
