//! Loops that are compiled for several instruction sets, and the choice among them.

/// An instruction set the loops are compiled for, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What every CPU of the target has.
    Scalar,
    /// x86-64 with AVX2.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and DQ.
    Avx512,
}

impl Level {
    /// The strongest level this CPU has. The standard library caches what the CPU says.
    #[cfg(target_arch = "x86_64")]
    pub fn best() -> Level {
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        match is_x86_feature_detected!("avx2") {
            true if avx512 => Level::Avx512,
            true => Level::Avx2,
            false => Level::Scalar,
        }
    }

    /// The strongest level this CPU has.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn best() -> Level {
        Level::Scalar
    }

    /// Every level this CPU has, weakest first.
    pub fn available() -> impl Iterator<Item = Level> {
        let best = Level::best();
        [Level::Scalar, Level::Avx2, Level::Avx512].into_iter().filter(move |&l| l <= best)
    }

    /// Runs a loop with the instructions of this level, or of the strongest that this CPU has.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn run(self, kernel: impl Kernel) {
        match self.min(Level::best()) {
            Level::Scalar => kernel.run(),
            // SAFETY: `best` is at least Avx2, so the CPU has AVX2.
            Level::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: `best` is Avx512, so the CPU has each feature named there.
            Level::Avx512 => unsafe { run_avx512(kernel) },
        }
    }

    /// Runs a loop; this target has one level.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn run(self, kernel: impl Kernel) {
        kernel.run();
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2(kernel: impl Kernel) {
    kernel.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512dq")]
fn run_avx512(kernel: impl Kernel) {
    kernel.run();
}

/// A loop over one chunk. `run` must be `inline(always)`: only code that is inlined into the
/// functions above is compiled with their instructions.
pub(crate) trait Kernel {
    fn run(self);
}
