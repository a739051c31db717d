//! Checks a weighted mean against one computed in another way: plain f64 arithmetic, no code
//! shared with the reducer. It works block by block, so it needs little memory for any model.
//!
//! A result is accepted if it is within half an ulp of its dtype (integers: one half) of the
//! mean, plus what rounding may add to a sum of K contributions. With S the weighted mean of |x|:
//!
//! | dtype | added to half an ulp |
//! |---|---|
//! | F32, F16, BF16 | (K + 5) 2^-24 S + (4 K + 8) 2^-53 S + (K + 1) 2^-148 |
//! | others | (4 K + 8) 2^-53 S + (K + 1) 2^-1071 |
//!
//! The first term is the reducer's: K roundings of products and sums, two of the weights, one of
//! the denominator, one of the quotient, and one for the products of such errors. The second holds
//! the roundings of this check, and those of a reducer that sums in f64. The last is for
//! products that underflow. (Recursive summation: Higham, Accuracy and Stability of Numerical
//! Algorithms, 2nd ed., section 4.2.) A mean that is NaN or infinite must be so in the result.
//! A BOOL must be the weighted majority, and may be either at a tie.

use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use half::{bf16, f16};
use safetensors::Dtype;

use crate::error::ReferenceError;
use crate::limits::REFERENCE_BLOCK_ELEMENTS;

/// Fills the slice with the bytes of a data section from an offset on. Called from many threads.
pub type ReadAt<'a> = dyn Fn(u64, &mut [u8]) -> io::Result<()> + Sync + 'a;

/// What one client contributed.
#[derive(Clone, Copy)]
pub struct Contribution<'a> {
    /// Its weight; zero leaves it out, and then it is not read.
    pub weight: f64,
    /// Its tensors.
    pub read: &'a ReadAt<'a>,
}

/// What was found in a result that is right.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Checked {
    /// Elements compared.
    pub elements: u64,
    /// Largest distance to the mean, as a part of the tolerance: at most 1.
    pub largest_error: f64,
}

/// Compares `result` with the weighted mean of `contributions`, element by element.
///
/// `runs` are the dtypes of stretches of the data section; `threads` is at least one.
///
/// # Errors
/// The element with the lowest offset that was found wrong, a contribution or result that cannot be
/// read, weights without a positive finite sum, a run of a dtype that has no mean or of a length
/// that is not whole elements.
pub fn check(
    runs: &[(Dtype, Range<u64>)],
    contributions: &[Contribution<'_>],
    result: &ReadAt<'_>,
    threads: usize,
) -> Result<Checked, ReferenceError> {
    let formats = runs.iter().map(Format::of_run).collect::<Result<Vec<_>, _>>()?;
    let shares = shares(contributions)?;
    let blocks = Mutex::new(formats.iter().zip(runs).flat_map(|(f, run)| f.blocks(&run.1)));
    let failed = AtomicBool::new(false);
    let work = || {
        let mut worker = Worker::new(&shares, result);
        let mut checked = Checked::default();
        while !failed.load(Relaxed) {
            let next = blocks.lock().map_or(None, |mut blocks| blocks.next());
            let Some((format, range)) = next else { break };
            let block = worker.check(format, range);
            let block = block.inspect_err(|_| failed.store(true, Relaxed))?;
            checked = checked.and(block);
        }
        Ok(checked)
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        // A panic can only come from a caller's closure: pass it on to the caller.
        let results = joined.map(|r| r.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        results.reduce(first_error).unwrap_or(Ok(Checked::default()))
    })
}

fn first_error(
    a: Result<Checked, ReferenceError>,
    b: Result<Checked, ReferenceError>,
) -> Result<Checked, ReferenceError> {
    match (a, b) {
        (Ok(a), Ok(b)) => Ok(a.and(b)),
        (Err(a), Err(b)) => Err(if b.offset() < a.offset() { b } else { a }),
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => Err(error),
    }
}

impl Checked {
    fn and(self, other: Checked) -> Checked {
        Checked {
            elements: self.elements + other.elements,
            largest_error: self.largest_error.max(other.largest_error),
        }
    }
}

/// A client that counts, and half of its part of the weight.
struct Share<'a> {
    client: usize,
    half: f64,
    read: &'a ReadAt<'a>,
}

/// Shares are halved, and so is every sum below, because a sum of the largest f64 numbers could
/// overflow where their mean does not.
fn shares<'a>(contributions: &[Contribution<'a>]) -> Result<Vec<Share<'a>>, ReferenceError> {
    let valid = contributions.iter().all(|c| c.weight >= 0.0);
    let sum: f64 = contributions.iter().map(|c| c.weight).sum();
    if !(valid && sum.is_finite() && sum > 0.0) {
        return Err(ReferenceError::Weights);
    }
    let counted = contributions.iter().enumerate().filter(|(_, c)| c.weight > 0.0);
    Ok(counted
        .map(|(client, c)| Share { client, half: c.weight / sum / 2.0, read: c.read })
        .collect())
}

/// What the check needs to know of a dtype.
#[derive(Clone, Copy)]
struct Format {
    dtype: Dtype,
    bytes: usize,
    /// The ulp of a float in [1, 2); zero for an integer.
    relative_ulp: f64,
    /// The ulp of the smallest numbers; one for an integer.
    least_ulp: f64,
    summed_in_f32: bool,
}

impl Format {
    fn of_run((dtype, range): &(Dtype, Range<u64>)) -> Result<Format, ReferenceError> {
        let power = |n: i32| 2f64.powi(n);
        let (relative_ulp, least_ulp, summed_in_f32) = match dtype {
            Dtype::F32 => (power(-23), power(-149), true),
            Dtype::F16 => (power(-10), power(-24), true),
            Dtype::BF16 => (power(-7), power(-133), true),
            Dtype::F64 => (power(-52), f64::from_bits(1), false),
            Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => (0.0, 1.0, false),
            Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => (0.0, 1.0, false),
            Dtype::BOOL => (0.0, 1.0, false),
            _ => return Err(ReferenceError::Dtype { dtype: *dtype, offset: range.start }),
        };
        let bytes = dtype.bitsize() / 8;
        let length = range.end.checked_sub(range.start);
        if length.is_none_or(|length| length % bytes as u64 != 0) {
            return Err(ReferenceError::Run { dtype: *dtype, range: range.clone() });
        }
        Ok(Format { dtype: *dtype, bytes, relative_ulp, least_ulp, summed_in_f32 })
    }

    fn blocks(self, run: &Range<u64>) -> impl Iterator<Item = (Format, Range<u64>)> + use<> {
        let (end, step) = (run.end, REFERENCE_BLOCK_ELEMENTS * self.bytes);
        let starts = run.clone().step_by(step);
        starts.map(move |start| (self, start..end.min(start.saturating_add(step as u64))))
    }

    /// The tolerance beyond half an ulp: a part of S, and an absolute part.
    fn slack(self, clients: usize) -> (f64, f64) {
        let k = clients as f64;
        let own = (4.0 * k + 8.0) * 2f64.powi(-53);
        match self.summed_in_f32 {
            true => (own + (k + 5.0) * 2f64.powi(-24), (k + 1.0) * 2f64.powi(-148)),
            false => (own, (k + 1.0) * f64::from_bits(1) * 8.0),
        }
    }

    /// The numbers in little-endian `bytes`. A 64-bit integer is rounded to f64.
    fn decode(self, bytes: &[u8], numbers: &mut [f64]) {
        macro_rules! each {
            ($size:literal, $number:expr) => {{
                let elements = bytes.as_chunks::<$size>().0;
                numbers.iter_mut().zip(elements).for_each(|(n, &b)| *n = $number(b));
            }};
        }
        match self.dtype {
            Dtype::F32 => each!(4, |b| f64::from(f32::from_le_bytes(b))),
            Dtype::F16 => each!(2, |b| f16::from_le_bytes(b).to_f64()),
            Dtype::BF16 => each!(2, |b| bf16::from_le_bytes(b).to_f64()),
            Dtype::F64 => each!(8, f64::from_le_bytes),
            Dtype::I8 => each!(1, |b| f64::from(i8::from_le_bytes(b))),
            Dtype::I16 => each!(2, |b| f64::from(i16::from_le_bytes(b))),
            Dtype::I32 => each!(4, |b| f64::from(i32::from_le_bytes(b))),
            Dtype::I64 => each!(8, |b| i64::from_le_bytes(b) as f64),
            Dtype::U16 => each!(2, |b| f64::from(u16::from_le_bytes(b))),
            Dtype::U32 => each!(4, |b| f64::from(u32::from_le_bytes(b))),
            Dtype::U64 => each!(8, |b| u64::from_le_bytes(b) as f64),
            _ => each!(1, |b: [u8; 1]| f64::from(b[0])),
        }
    }
}

/// One thread's buffers.
struct Worker<'a> {
    shares: &'a [Share<'a>],
    result: &'a ReadAt<'a>,
    bytes: Vec<u8>,
    numbers: Vec<f64>,
    /// Half the mean of each element, and half the mean of its absolute values.
    halves: Vec<(f64, f64)>,
}

impl<'a> Worker<'a> {
    fn new(shares: &'a [Share<'a>], result: &'a ReadAt<'a>) -> Worker<'a> {
        Worker { shares, result, bytes: vec![], numbers: vec![], halves: vec![] }
    }

    fn check(&mut self, format: Format, range: Range<u64>) -> Result<Checked, ReferenceError> {
        let offset = range.start;
        let bytes = (range.end - range.start) as usize;
        self.bytes.resize(bytes, 0);
        self.numbers.resize(bytes / format.bytes, 0.0);
        self.halves.clear();
        self.halves.resize(bytes / format.bytes, (0.0, 0.0));
        for share in self.shares {
            let client = Some(share.client);
            (share.read)(offset, &mut self.bytes).map_err(|source| ReferenceError::Read {
                offset,
                client,
                source,
            })?;
            format.decode(&self.bytes, &mut self.numbers);
            if format.dtype == Dtype::BOOL {
                self.numbers.iter_mut().for_each(|n| *n = f64::from(u8::from(*n != 0.0)));
            }
            for ((mean, spread), &number) in self.halves.iter_mut().zip(&self.numbers) {
                let product = share.half * number;
                *mean += product;
                *spread += product.abs();
            }
        }
        (self.result)(offset, &mut self.bytes).map_err(|source| ReferenceError::Read {
            offset,
            client: None,
            source,
        })?;
        format.decode(&self.bytes, &mut self.numbers);
        match format.dtype {
            Dtype::BOOL => self.compare_votes(format, offset),
            _ => self.compare(format, offset),
        }
    }

    fn compare(&self, format: Format, offset: u64) -> Result<Checked, ReferenceError> {
        let slack = format.slack(self.shares.len());
        let (mut wrong, mut largest_error) = (false, 0.0);
        for (&result, &half) in self.numbers.iter().zip(&self.halves) {
            let difference = Difference::new(format, slack, result, half);
            wrong |= !difference.within();
            let share = difference.error / difference.tolerance;
            largest_error = if share > largest_error { share } else { largest_error };
        }
        if wrong {
            self.explain(format, offset, slack)?;
        }
        Ok(Checked { elements: self.numbers.len() as u64, largest_error })
    }

    /// Looks closely at a block with elements outside the tolerance: NaN and infinity have no
    /// distance, so those that are right are there too.
    fn explain(
        &self,
        format: Format,
        offset: u64,
        slack: (f64, f64),
    ) -> Result<(), ReferenceError> {
        for (index, (&got, &half)) in self.numbers.iter().zip(&self.halves).enumerate() {
            let difference = Difference::new(format, slack, got, half);
            let not_a_number = got.is_nan() && half.0.is_nan();
            let infinite = half.0.is_infinite() && got == half.0;
            if !(difference.within() || not_a_number || infinite) {
                return Err(ReferenceError::Differs {
                    offset: offset + (index * format.bytes) as u64,
                    dtype: format.dtype,
                    expected: 2.0 * half.0,
                    got,
                    tolerance: difference.tolerance,
                });
            }
        }
        Ok(())
    }

    fn compare_votes(&self, format: Format, offset: u64) -> Result<Checked, ReferenceError> {
        let tolerance = format.slack(self.shares.len()).0;
        for (index, (&got, &(half, _))) in self.numbers.iter().zip(&self.halves).enumerate() {
            let majority = f64::from(u8::from(2.0 * half > 0.5));
            let tie = (2.0 * half - 0.5).abs() <= tolerance && (got == 0.0 || got == 1.0);
            if got != majority && !tie {
                let offset = offset + index as u64;
                let dtype = format.dtype;
                return Err(ReferenceError::Differs {
                    offset,
                    dtype,
                    expected: majority,
                    got,
                    tolerance: 0.0,
                });
            }
        }
        Ok(Checked { elements: self.numbers.len() as u64, largest_error: 0.0 })
    }
}

struct Difference {
    error: f64,
    tolerance: f64,
}

impl Difference {
    #[inline(always)]
    fn new(format: Format, slack: (f64, f64), result: f64, half: (f64, f64)) -> Difference {
        /// The bits of an f64 that hold its exponent: alone, they are the power of two below it.
        const EXPONENT: u64 = 0x7ff << 52;
        let (mean, spread) = half;
        let binade = f64::from_bits(mean.to_bits() & EXPONENT);
        let ulp = (binade * (2.0 * format.relative_ulp)).max(format.least_ulp);
        let tolerance = 0.5 * ulp + slack.0 * 2.0 * spread + slack.1;
        Difference { error: 2.0 * (0.5 * result - mean).abs(), tolerance }
    }

    /// False for NaN too, and for an infinite mean, whose tolerance is infinite.
    #[inline(always)]
    fn within(&self) -> bool {
        self.error <= self.tolerance.min(f64::MAX)
    }
}
