//! Every bound and default, with its reason.

use std::time::Duration;

/// Bytes of parameters that are checked and averaged as one unit. A chunk that was just received is
/// still in a cache; smaller ones cost more calls: 512 KiB 2 % more CPU in all, 256 KiB 6 %.
pub const CHUNK_BYTES: u64 = 1 << 20;

/// Smallest chunk that may be asked for: below this, per-chunk costs outweigh the payload.
pub const MIN_CHUNK_BYTES: u64 = 4 << 10;

/// Largest chunk that may be asked for: a receiver buffers one chunk of each stream.
pub const MAX_CHUNK_BYTES: u64 = 16 << 20;

/// Longest safetensors header that is read. The official library refuses headers above 100 MB;
/// ours also travels as one control message.
pub const MAX_HEADER_BYTES: u64 = 32 << 20;

/// Most tensors in one model. The largest public checkpoints hold some tens of thousands.
pub const MAX_TENSORS: usize = 1 << 18;

/// Longest tensor name in bytes.
pub const MAX_TENSOR_NAME_BYTES: usize = 4096;

/// Most dimensions of one tensor. NumPy stops at 64.
pub const MAX_TENSOR_DIMS: usize = 64;

/// Most chunks of one model: a checksum of 8 bytes is kept for each, 32 MiB for each client. At the
/// default chunk size this is a model of 1 TiB.
pub const MAX_CHUNKS: usize = 1 << 22;

/// Largest data section, 64 TiB: no more can be cut into [`MAX_CHUNKS`] of [`MAX_CHUNK_BYTES`].
/// It also keeps every file position far inside the signed 64 bits of the kernel.
pub const MAX_MODEL_BYTES: u64 = 1 << 46;

/// Largest power of two, up or down, by which a source scales. Demonstrations need a handful;
/// up to here the factor is a normal number in every dtype that is computed in f32.
pub const MAX_SCALE_EXPONENT: i32 = 64;

/// Clients below one edge, however deep. A list of them, with their names, takes some MiB.
pub const MAX_LEAVES: usize = 1 << 14;

/// Bytes of clients that an edge names in one message: with names and reasons, which are cut, it then
/// fits in a short one.
pub const LEAVES_BYTES: usize = 32 << 10;

/// Smallest part of the sum of weights that a positive weight may be: 2^-64. Weights count
/// examples, and one example is more than this part of any 64-bit count. From here up, a scaled
/// weight is a normal f32, so it keeps all its bits.
pub const MIN_WEIGHT_SHARE: f64 = 1.0 / (1u128 << 64) as f64;

/// Smallest factor that an update is clipped with, 2^-48: a larger update is left out instead. From
/// here up, its weight is a normal f32 also with the smallest [`MIN_WEIGHT_SHARE`].
pub const MIN_CLIP_FACTOR: f64 = 1.0 / (1u64 << 48) as f64;

/// Alignment in bytes of each run's start in the accumulator: one cache line, one AVX-512 register.
pub const ACCUMULATOR_ALIGN_BYTES: u64 = 64;

/// Elements the reference average works on at once: its three f64 numbers for each of them, 384
/// KiB, stay in L2.
pub const REFERENCE_BLOCK_ELEMENTS: usize = 16 << 10;

/// Bytes that are prepared and handed to the kernel at once: `send` of 1 MiB costs the least CPU
/// of 64 KiB, 256 KiB and 1 MiB, and 1 MiB that was just summed is still in a cache.
pub const SEND_STEP_BYTES: u64 = 1 << 20;

/// Bytes that a send path is tried with before it is chosen: they fit any socket's buffer.
pub const TRIAL_BYTES: u64 = 4 << 10;

/// A reader is woken when so much waits: 60 % fewer wake-ups than without; 128 KiB costs speed.
pub const RECEIVE_LOW_WATER_BYTES: u64 = 64 << 10;

/// The same where a lane has other streams to work on meanwhile: chunks in fewer pieces use fewer
/// buffers, and so more of the cache; 512 KiB lets lanes sleep while there is work.
pub const SHARED_LOW_WATER_BYTES: u64 = 256 << 10;

/// Size of a pipe for splice: the most that a user without rights may ask for.
pub const PIPE_BYTES: usize = 1 << 20;

/// Memory that a region must leave free: this process and the kernel's socket buffers need some.
pub const MEMORY_RESERVE_BYTES: u64 = 64 << 20;

/// Times that a warm region may fit nothing before it is given up: a round takes a few sizes.
pub const PASSED_OVER: u32 = 8;

/// Longest control message: one that holds the longest header.
pub const MAX_FRAME_BYTES: u64 = MAX_HEADER_BYTES + (64 << 10);

/// Longest message between those who have agreed on a model: so many checksums or ranges as below, or a
/// text. Only a header is longer, and that comes with the first message or with the plan.
pub const MAX_SHORT_FRAME_BYTES: u64 = 64 << 10;

/// Bytes of one client's messages that may wait until the session has time for them: it may be
/// averaging for minutes. A client says a few hundred bytes in that time.
pub const MAX_UNHEARD_BYTES: u64 = 1 << 20;

/// What a message that waits takes beside its own bytes.
pub const UNHEARD_BYTES: u64 = 64;

/// Checksums in one control message, 32 KiB of them: signs of life wait no longer than that takes.
pub const SUMS_PER_MESSAGE: usize = 4096;

/// Ranges of chunks in one control message.
pub const RANGES_PER_MESSAGE: usize = 4096;

/// Checksums that are asked for at once when they may have been lost with a connection: the bytes that
/// came with them fit a socket's buffer.
pub const SUMS_ASKED: usize = 16;

/// How often a chunk that does not match its checksum is asked for again: whatever changes it each
/// time is no accident.
pub const MAX_REPEATS: u32 = 3;

/// How often a client may ask for each chunk of a model over one connection, on average: for its bytes, for
/// its checksum, and both again whenever it did not match.
pub const MAX_ASKED: usize = 2 * (1 + MAX_REPEATS as usize);

/// Descriptors that an aggregator has besides those of its clients: standard streams, listener,
/// regions, pollers.
pub const OWN_DESCRIPTORS: u64 = 16;

/// Open files that an exchange asks for: many transfers at once take a few each.
pub const EXCHANGE_DESCRIPTORS: u64 = 1 << 16;

/// Messages that may come while a client trains: an update is wanted on each stream.
pub const EARLY_MESSAGES: usize = 4 * MAX_STREAMS;

/// Chunks of one lane whose sums stay in a cache, so that clients may be a few chunks apart.
pub const MEAN_TILES: usize = 4;

/// Most clients of one session. Each holds one thread and one socket per lane.
pub const MAX_CLIENTS: usize = 4096;

/// Clients that an exchange sends models to at once. Each has some threads and sockets.
pub const MAX_SERVED: usize = 1024;

/// Most lanes of one session. More than the cores of a host gain nothing.
pub const MAX_STREAMS: usize = 64;

/// Most bytes of the certificate that a host of a ring makes for a session.
pub const MAX_CERTIFICATE_BYTES: usize = 4 << 10;

/// Most hosts in a ring: in a larger one, a host that is slow holds up too many.
pub const MAX_RANKS: usize = 64;

/// Bytes of a chunk in a ring: half of what is in the cache of a core, with the host's own chunk beside
/// it; 256 KiB and 1 MiB cost more CPU.
pub const RING_CHUNK_BYTES: u64 = 512 << 10;

/// Bytes of sums that a host of a ring holds on each lane, about: they stay in a cache. Twice as much where
/// means do not stay; less with more than four lanes.
pub const RING_STAGE_BYTES: u64 = 16 << 20;

/// Most hosts in a profile: all clients of a session, and as many that may average.
pub const MAX_PLAN_HOSTS: usize = 2 * MAX_CLIENTS;

/// Most aggregators that a plan weighs: each is tried as the root of a tree.
pub const MAX_PLAN_AGGREGATORS: usize = 256;

/// Most links in a profile: 256 for each client.
pub const MAX_PLAN_LINKS: usize = 1 << 20;

/// Longest profile that is read: [`MAX_PLAN_LINKS`] take about so much.
pub const MAX_PROFILE_BYTES: u64 = 256 << 20;

/// Most bytes of one transfer that measures a link: half a second at 17 Gbit/s.
pub const MAX_SPEED_BYTES: u64 = 1 << 30;

/// Bytes of a message between hosts that measure: a few numbers and a name.
pub const MAX_SPEED_MESSAGE_BYTES: u64 = 1 << 10;

/// Questions that a host that measures may ask.
pub const MAX_SPEED_QUESTIONS: usize = 64;

/// Hosts that wait to be measured at once.
pub const MAX_SPEED_VISITORS: usize = 16;

/// Longest time that measuring one link may take; links of a megabit a second are done in less.
pub const SPEED_SESSION: Duration = Duration::from_secs(60);

/// Longest name of a host in a profile, in bytes.
pub const MAX_HOST_NAME_BYTES: usize = 256;

/// Clients and aggregators up to which a plan is proven to be the best one: this takes milliseconds.
pub const EXACT_CLIENTS: usize = 10;

/// See [`EXACT_CLIENTS`].
pub const EXACT_AGGREGATORS: usize = 3;

/// Hosts up to which the order of a ring or chain is proven to be the best one.
pub const EXACT_ORDER: usize = 10;

/// Most rounds of one session.
pub const MAX_ROUNDS: u32 = 1_000_000;

/// Payload of a full record of TLS.
pub const TLS_RECORD_BYTES: usize = 16 << 10;

/// Records that the kernel makes with one key, counted high; 128 GiB in full records. AES-GCM allows
/// 2^24.5 (RFC 8446, 5.5), but kernels before 6.14 take no second key, so another connection is made.
pub const KERNEL_TLS_RECORDS: u64 = 1 << 23;

/// How long a visitor may take to say who it is, all its bytes together.
pub const HANDSHAKE: Duration = Duration::from_secs(10);

/// Bytes a second of a first message that is longer than a handshake: 1 Mbit/s.
pub const SLOWEST_LINK_BYTES_S: u64 = 125_000;

/// Visitors that may be about to say who they are, at once.
pub const MAX_VISITORS: usize = 256;

/// Visitors that there is always room for, where open files are few.
pub const MIN_VISITORS: usize = 8;

/// Threads that serve visitors: those that were made to leave need a moment for it.
pub const MAX_VISITOR_THREADS: u64 = 2 * MAX_VISITORS as u64;

/// Clients beyond those that an aggregator waits for that may be about to be refused: it may be busy.
pub const MAX_LATE: usize = 64;

/// Longest message that always has room: the header of a model of some thousand tensors.
pub const USUAL_FRAME_BYTES: u64 = 256 << 10;

/// Bytes of visitors' first messages that are read at once, beyond which longer ones are refused.
pub const MAX_VISITORS_BYTES: u64 = 2 * MAX_FRAME_BYTES;

/// Bytes of headers that clients hold who have asked to join and whom nobody has looked at yet.
pub const MAX_JOINED_BYTES: u64 = 8 * MAX_FRAME_BYTES;

/// Lines about visitors that are logged in one second; more are counted only.
pub const MAX_COMPLAINTS: u32 = 20;

/// Silence after which a peer is given up: longer than a congested link or a busy host pauses.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Shortest deadline: signs of life are sent four times in it.
pub const MIN_DEADLINE_MS: u64 = 200;

/// The same as a duration: how often signs of life are sent while the peer's deadline is unknown.
pub const MIN_DEADLINE: Duration = Duration::from_millis(MIN_DEADLINE_MS);

/// Longest deadline, a day: a longer one would be no deadline.
pub const MAX_DEADLINE_MS: u64 = 24 * 3600 * 1000;

/// Bytes a second at which even the slowest disk saves a model: a client that has received a model
/// may take so long, beyond the deadline, until it confirms.
pub const SLOWEST_DISK_BYTES_S: u64 = 10 << 20;

/// Pause before a connection that broke is dialled again for the second time; later ones grow.
pub const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Longest of these pauses.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How long to wait for a peer's reason after its data channel broke.
pub const LAST_WORDS: Duration = Duration::from_millis(500);

/// Characters of a peer's text that are shown.
pub const MAX_SHOWN_CHARS: usize = 512;

/// Bytes that a probe moves over a path: more than a default socket buffer or pipe takes at
/// once, so that a path has to come again, and few enough to be done in a millisecond.
pub const PROBE_BYTES: usize = 1 << 20;

/// How long a probe of one path may take: a thousand times what an idle host needs.
pub const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
