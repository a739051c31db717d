//! Bounds on what peers make us hold: who holds something has a share of a quota, and gives it back
//! when it is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How much of something there may be at once.
#[derive(Debug)]
pub(crate) struct Quota {
    most: u64,
    taken: AtomicU64,
}

/// A part of a quota.
#[derive(Debug)]
pub(crate) struct Share {
    quota: Arc<Quota>,
    amount: u64,
}

impl Quota {
    pub fn new(most: u64) -> Arc<Quota> {
        Arc::new(Quota { most, taken: AtomicU64::new(0) })
    }

    /// A share, as long as there is so much left.
    pub fn take(self: &Arc<Self>, amount: u64) -> Option<Share> {
        let fits = |taken: u64| taken.checked_add(amount).filter(|&taken| taken <= self.most);
        let taken = self.taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits);
        taken.is_ok().then(|| Share { quota: self.clone(), amount })
    }

    /// A share of what has room in any case, and counts all the same.
    pub fn take_anyway(self: &Arc<Self>, amount: u64) -> Share {
        self.taken.fetch_add(amount, Ordering::SeqCst);
        Share { quota: self.clone(), amount }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.quota.taken.fetch_sub(self.amount, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        let quota = Quota::new(10);
        let first = quota.take(6).unwrap();
        assert!(quota.take(5).is_none() && quota.take(u64::MAX).is_none());
        let second = quota.take(4).unwrap();
        assert!(quota.take(1).is_none());
        let third = quota.take_anyway(3);
        drop(first);
        assert!(quota.take(4).is_none());
        drop((second, third));
        assert!(quota.take(10).is_some());
    }
}
