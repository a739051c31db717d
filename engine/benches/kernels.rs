//! Speed of the reducer's loops on one chunk that is in cache. Bytes are those of the payload
//! (or, for `finish`, of the result).

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fedlane::limits::CHUNK_BYTES;
use fedlane::reducer::{
    Level, Norm, Weights, accumulate_at, accumulator, clean_at, finish_at, inspect_at,
};
use fedlane::wire::checksum::chunk_sum;
use safetensors::Dtype;

const DTYPES: [Dtype; 8] = [
    Dtype::F32,
    Dtype::BF16,
    Dtype::F16,
    Dtype::F64,
    Dtype::I64,
    Dtype::I32,
    Dtype::U8,
    Dtype::BOOL,
];

/// Bytes whose elements are ordinary numbers in every dtype: no NaN, no subnormal.
fn payload() -> Vec<u8> {
    (0..CHUNK_BYTES).map(|i| if i % 2 == 1 { 0x3c } else { i as u8 }).collect()
}

fn bytes(sums: &mut [u64]) -> &mut [u8] {
    zerocopy::IntoBytes::as_mut_bytes(sums)
}

fn kernels(criterion: &mut Criterion) {
    let weights = Weights::new(&[3.0, 5.0]).unwrap();
    let weight = weights.get(0).unwrap();
    let payload = payload();
    let mut checksum = criterion.benchmark_group("checksum");
    checksum.throughput(Throughput::Bytes(CHUNK_BYTES));
    checksum.bench_function("chunk_sum", |bencher| bencher.iter(|| chunk_sum(black_box(&payload))));
    checksum.finish();
    for dtype in DTYPES {
        let elements = payload.len() / (dtype.bitsize() / 8);
        let sum_bytes = accumulator("", dtype).unwrap().bytes() as usize;
        let mut sums = vec![0u64; elements * sum_bytes / 8];
        let mut out = payload.clone();
        let mut group = criterion.benchmark_group(format!("{dtype:?}"));
        group.throughput(Throughput::Bytes(CHUNK_BYTES));
        for level in Level::available() {
            for (name, first) in [("first", true), ("add", false)] {
                let id = BenchmarkId::new(name, format!("{level:?}"));
                group.bench_function(id, |bencher| {
                    bencher.iter(|| {
                        let payload = black_box(&payload);
                        accumulate_at(level, dtype, first, weight, payload, bytes(&mut sums))
                    });
                });
            }
            let model = payload.clone();
            let norms = [
                ("finite", Norm::Skip),
                ("norm", Norm::OfUpdate),
                ("norm of change", Norm::OfChange(&model)),
            ];
            for (name, norm) in norms {
                let id = BenchmarkId::new(name, format!("{level:?}"));
                group.bench_function(id, |bencher| {
                    bencher.iter(|| inspect_at(level, dtype, black_box(&payload), norm));
                });
            }
            let id = BenchmarkId::new("clean", format!("{level:?}"));
            group.bench_function(id, |bencher| {
                let mut payload = payload.clone();
                bencher.iter(|| clean_at(level, dtype, black_box(&mut payload)));
            });
            accumulate_at(level, dtype, true, weight, &payload, bytes(&mut sums)).unwrap();
            let id = BenchmarkId::new("finish", format!("{level:?}"));
            group.bench_function(id, |bencher| {
                bencher.iter(|| {
                    let sums = black_box(bytes(&mut sums));
                    finish_at(level, dtype, &weights, sums, &mut out)
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, kernels);
criterion_main!(benches);
