//! Numbers from a seed.

/// The same seed gives the same numbers: splitmix64.
pub struct Dice(u64);

impl Dice {
    /// Dice that begin here.
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    /// The next number below `end`, which is at least 1.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    /// One of these.
    pub fn pick<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize].clone()
    }
}
