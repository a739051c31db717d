//! Regions, and the pool that keeps them warm.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use fedlane::limits::PASSED_OVER;
use fedlane::pool::RegionPool;
use fedlane::region::Region;
use fedlane::sys::memory::Pages;

const PAGE: u64 = 4096;

/// A region that can be told from one that was made new, which is zero.
fn marked(bytes: u64) -> Region {
    let mut region = Region::new(bytes).unwrap();
    region.bytes_mut().0.fill(7);
    region
}

fn is_marked(region: &Region) -> bool {
    region.bytes().iter().all(|byte| *byte == 7)
}

#[test]
fn a_pool_gives_what_it_was_given_once() {
    let pool = RegionPool::default();
    pool.give_back(marked(PAGE));
    assert!(is_marked(&pool.take(PAGE).unwrap()));
    assert!(!is_marked(&pool.take(PAGE).unwrap()));
}

#[test]
fn a_pool_keeps_what_does_not_fit_for_some_time() {
    let pool = RegionPool::default();
    pool.give_back(marked(PAGE));
    for times in 1..=u64::from(PASSED_OVER) {
        drop(pool.take(PAGE + times).unwrap());
    }
    assert!(is_marked(&pool.take(PAGE).unwrap()));
}

#[test]
fn a_pool_gives_up_what_fits_nothing() {
    let pool = RegionPool::default();
    pool.give_back(marked(PAGE));
    for times in 1..=u64::from(PASSED_OVER) + 1 {
        drop(pool.take(PAGE + times).unwrap());
    }
    assert!(!is_marked(&pool.take(PAGE).unwrap()));
}

/// Two sizes in turn, each warm, are both kept for ever.
#[test]
fn a_pool_keeps_what_is_in_use() {
    let pool = RegionPool::default();
    pool.give_back(marked(PAGE));
    pool.give_back(marked(2 * PAGE));
    for _ in 0..10 * PASSED_OVER {
        for bytes in [PAGE, 2 * PAGE] {
            let region = pool.take(bytes).unwrap();
            assert!(is_marked(&region));
            pool.give_back(region);
        }
    }
}

#[test]
fn warming_a_warm_pool_makes_nothing_new() {
    let pool = RegionPool::default();
    pool.give_back(marked(PAGE));
    // One more would be found when the old one has gone behind it.
    for _ in 0..3 {
        pool.warm([PAGE].into_iter()).unwrap();
        let region = pool.take(PAGE).unwrap();
        assert!(is_marked(&region));
        pool.give_back(region);
    }
    // Two are asked for at once: one is made.
    pool.warm([PAGE, PAGE].into_iter()).unwrap();
    let both = [pool.take(PAGE).unwrap(), pool.take(PAGE).unwrap()];
    assert_eq!(both.iter().filter(|region| is_marked(region)).count(), 1);
}

fn file_of(region: &Region) -> OwnedFd {
    region.file().try_clone_to_owned().unwrap()
}

#[test]
fn an_adopted_region_is_the_same_memory() {
    let mut owner = Region::new(3 * PAGE).unwrap();
    let mut adopted = Region::adopt(file_of(&owner), 100, 2 * PAGE).unwrap();
    owner.bytes_mut().0[100] = 1;
    owner.bytes_mut().0[100 + 2 * PAGE as usize - 1] = 2;
    assert_eq!((adopted.bytes()[0], adopted.bytes()[2 * PAGE as usize - 1]), (1, 2));
    assert_eq!((adopted.bytes().len() as u64, adopted.position()), (2 * PAGE, 100));
    adopted.bytes_mut().0[1] = 3;
    assert_eq!(owner.bytes()[101], 3);
    // The memory outlives its maker.
    drop(owner);
    assert_eq!(adopted.bytes()[..2], [1, 3]);
}

#[test]
fn a_file_that_is_too_short_is_not_adopted() {
    let owner = Region::new(PAGE).unwrap();
    assert!(Region::adopt(file_of(&owner), 0, PAGE).is_ok());
    assert!(Region::adopt(file_of(&owner), PAGE, 0).is_ok());
    for (position, bytes) in
        [(0, PAGE + 1), (1, PAGE), (PAGE + 1, 0), (u64::MAX, 1), (1 << 63, 0), (0, 1 << 63)]
    {
        let error = Region::adopt(file_of(&owner), position, bytes).err().unwrap();
        assert!(error.to_string().contains("too short"), "{position}, {bytes}: {error}");
    }
}

/// Otherwise whoever has adopted it would be ended by SIGBUS.
#[test]
fn nobody_can_make_a_region_on_base_pages_shorter() {
    let region = Region::new(PAGE).unwrap();
    assert_eq!(region.pages(), Pages::Base);
    let file = File::from(file_of(&region));
    assert!(file.set_len(0).is_err());
    assert!(file.set_len(2 * PAGE).is_err());
    assert_eq!(file.metadata().unwrap().len(), PAGE);
}

#[test]
fn who_borrows_memory_sees_nothing_of_others() {
    let pool = RegionPool::default();
    pool.give_back(marked(PAGE));
    let region = pool.lend(PAGE, "run 1").unwrap();
    assert!(region.bytes().iter().all(|byte| *byte == 0), "what a session left there is seen");
    let mut file = File::from(region.file().try_clone_to_owned().unwrap());
    let write = |file: &mut File| file.write_all_at(&[7; PAGE as usize], 0).unwrap();
    write(&mut file);
    pool.give_back(region);
    // Its own is still there: to make it zero would cost time for nothing.
    let region = pool.lend(PAGE, "run 1").unwrap();
    assert!(is_marked(&region));
    pool.give_back(region);
    let region = pool.lend(PAGE, "run 2").unwrap();
    assert!(region.bytes().iter().all(|byte| *byte == 0), "what another run left there is seen");
    write(&mut file);
    pool.give_back(region);
    // In between it belonged to a session of this process.
    pool.give_back(pool.take(PAGE).unwrap());
    let region = pool.lend(PAGE, "run 2").unwrap();
    assert!(region.bytes().iter().all(|byte| *byte == 0), "a session's bytes are seen");
}

/// A file is as large as its pages: what stands behind the end of the region is made zero too.
#[test]
fn nor_behind_the_end() {
    let pool = RegionPool::default();
    let region = pool.lend(PAGE - 96, "run 1").unwrap();
    let file = File::from(region.file().try_clone_to_owned().unwrap());
    file.write_all_at(&[7; 96], PAGE - 96).unwrap();
    pool.give_back(region);
    let _region = pool.lend(PAGE - 96, "run 2").unwrap();
    let mut behind = [1; 96];
    file.read_exact_at(&mut behind, PAGE - 96).unwrap();
    assert_eq!(behind, [0; 96]);
}

/// Each borrower gets back what was its own, whoever was here last.
#[test]
fn memory_that_was_warmed_or_lent_is_not_made_zero_without_need() {
    let pool = RegionPool::default();
    let (first, second) = (pool.lend(PAGE, "a").unwrap(), pool.lend(PAGE, "b").unwrap());
    let places = [first.bytes().as_ptr(), second.bytes().as_ptr()];
    pool.give_back(first);
    pool.give_back(second);
    let (second, first) = (pool.lend(PAGE, "b").unwrap(), pool.lend(PAGE, "a").unwrap());
    assert_eq!([first.bytes().as_ptr(), second.bytes().as_ptr()], places);
}

#[test]
fn what_was_taken_for_an_owner_is_lent_to_him_as_it_is() {
    let pool = RegionPool::default();
    let mut region = pool.take_for(PAGE, "run 1").unwrap();
    region.bytes_mut().0.fill(7);
    pool.give_back(region);
    let region = pool.lend(PAGE, "run 1").unwrap();
    assert!(region.bytes().iter().all(|&byte| byte == 7), "it was his own");
    pool.give_back(region);
    // Others take it as it is, and are not lent it so.
    pool.give_back(pool.take_for(PAGE, "run 2").unwrap());
    let region = pool.lend(PAGE, "run 2").unwrap();
    assert!(region.bytes().iter().all(|&byte| byte == 0), "bytes of run 1");
}
