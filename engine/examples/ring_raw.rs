use std::sync::Arc;
use std::time::Instant;
use fedlane::channel::DataChannel;
use fedlane::control::{self, Congestion};
use fedlane::link::Link;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::region::Region;
use fedlane::source::region::RegionSource;
// rank ranks mib chunk_kib reps path baseport
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let n = |i: usize| a[i].parse::<u64>().unwrap();
    let (rank, ranks, mib, chunk, reps) = (n(1) as usize, n(2) as usize, n(3), n(4) << 10, n(5));
    let path = a[6].parse().unwrap();
    let base = n(7) as u16;
    let elements = mib << 18;
    let m = Manifest::from_tensors([("w".to_string(), Dtype::F32, vec![elements])], &Default::default()).unwrap();
    let mut src = Region::new(mib << 20).unwrap();
    for (i, c) in src.bytes_mut().0.chunks_exact_mut(4).enumerate() { c.copy_from_slice(&(((i % 1021) * (rank + 1)) as f32).to_le_bytes()); }
    let mut out = Region::new(mib << 20).unwrap();
    let listener = control::listen(("127.0.0.1", base + rank as u16), &Congestion::Auto).unwrap();
    for rep in 0..reps {
        let right = loop { match control::dial(("127.0.0.1", base + ((rank + 1) % ranks) as u16), &Congestion::Auto, std::time::Duration::from_secs(5)) { Ok(s) => break s, Err(_) => std::thread::sleep(std::time::Duration::from_millis(20)) } };
        let (left, _) = listener.accept().unwrap();
        control::settle(&left, &Congestion::Auto).unwrap();
        let left = Arc::new(DataChannel::new(Link::plain(left)).unwrap());
        let right = Arc::new(DataChannel::new(Link::plain(right)).unwrap());
        let source = RegionSource::new(&m, &src, chunk, vec![]);
        let u0 = fedlane::sys::process::usage();
        let t = Instant::now();
        fedlane::ring::bench_lane(rank, &m, &source, &vec![1.0; ranks], &mut out, chunk, path, left.clone(), right.clone());
        let s = t.elapsed().as_secs_f64();
        let u = fedlane::sys::process::usage();
        std::thread::sleep(std::time::Duration::from_millis(300));
        let ok = out.bytes().chunks_exact(4).enumerate().all(|(i, c)| f32::from_le_bytes(c.try_into().unwrap()) == ((i % 1021) as f32) * (ranks as f32 + 1.0) / 2.0);
        println!("rank {rank} rep {rep} {s:.3} s cpu u {:.2} k {:.2} ok {ok}", u.cpu_user_s - u0.cpu_user_s, u.cpu_kernel_s - u0.cpu_kernel_s);
        std::thread::sleep(std::time::Duration::from_millis(700));
    }
}
