//! Models on offer.

use std::os::fd::AsFd;
use std::sync::Arc;

use fedlane::client::{Client, ClientConfig, Target, Task};
use fedlane::control::Congestion;
use fedlane::error::ClientError;
use fedlane::exchange::{Parcel, call, fetch};
use fedlane::paths::ReceiveKind;
use fedlane::pool::RegionPool;
use fedlane::region::Region;
use fedlane::wire::message::{AggregatorMessage, ClientMessage};

use crate::common::{PATIENCE, exchange, floats, line, parcel, patient, secret, until};
use crate::peer::{Peer, join};
use crate::updates::awkward;

#[test]
fn many_clients_get_the_model_bit_for_bit() {
    let exchange = patient();
    let model = parcel(&awkward(), 1, exchange.pool());
    exchange.offer(secret(1), model.clone());
    let fetch_one = |number: usize| {
        let pool = Arc::new(RegionPool::default());
        let fetched =
            fetch(&line(&exchange, &format!("client {number}")), secret(1), &pool).unwrap();
        assert_eq!(fetched.manifest().header(), model.manifest().header());
        assert!(fetched.region().bytes() == model.region().bytes(), "client {number}");
        // It came into memory of the client's pool, and goes back there.
        let place = fetched.region().bytes().as_ptr();
        drop(fetched);
        assert_eq!(pool.take(model.manifest().data_bytes()).unwrap().bytes().as_ptr(), place);
    };
    std::thread::scope(|scope| {
        (0..12).for_each(|number| drop(scope.spawn(move || fetch_one(number))));
    });
    assert!(exchange.has_met("client 11") && !exchange.has_met("client 12"));
}

#[test]
fn a_model_that_is_changed_while_it_is_on_offer_is_found_out() {
    let exchange = patient();
    let manifest = floats();
    let mut memory = Region::new(manifest.data_bytes()).unwrap();
    let file = memory.file().try_clone_to_owned().unwrap();
    let model = Arc::new(Parcel::adopt(manifest, file, 0).unwrap());
    exchange.offer(secret(1), model);
    memory.bytes_mut().0[2_000_000] ^= 1;
    let error = fetch(&line(&exchange, "c"), secret(1), &Arc::default()).err().unwrap();
    assert!(error.to_string().contains("do not match their checksum"), "{error}");
    memory.bytes_mut().0[2_000_000] ^= 1;
    fetch(&line(&exchange, "c"), secret(1), &Arc::default()).unwrap();
}

#[test]
fn a_parcel_can_be_a_part_of_a_memory_file() {
    let exchange = patient();
    let manifest = floats();
    let bytes = manifest.data_bytes() as usize;
    let mut memory = Region::new(bytes as u64 + 10_000).unwrap();
    memory.bytes_mut().0.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i % 251) as u8);
    let file = memory.file().try_clone_to_owned().unwrap();
    let model = Arc::new(Parcel::adopt(manifest, file, 4_100).unwrap());
    exchange.offer(secret(1), model);
    let fetched = fetch(&line(&exchange, "c"), secret(1), &Arc::default()).unwrap();
    assert!(fetched.region().bytes() == &memory.bytes()[4_100..4_100 + bytes]);
}

#[test]
fn a_model_that_is_withdrawn_while_it_is_fetched_still_comes() {
    let exchange = patient();
    let manifest = floats();
    let model = parcel(&manifest, 1, exchange.pool());
    let content = model.region().bytes().to_vec();
    let place = model.region().bytes().as_ptr();
    exchange.offer(secret(1), model);
    let mut peer = Peer::come(&exchange, &join("slow", &[], secret(1).place()), secret(1));
    peer.agree();
    let AggregatorMessage::Download { round: 0, digest } = peer.next().unwrap() else {
        panic!("no model")
    };
    exchange.release(secret(1));
    let error = fetch(&line(&exchange, "late"), secret(1), &Arc::default()).err().unwrap();
    assert!(matches!(error, ClientError::NotWanted { .. }), "{error}");
    peer.want(&manifest);
    assert!(peer.receive(&manifest) == content);
    peer.say(&ClientMessage::Received { round: 0, digest });
    while let AggregatorMessage::Sums { .. } = peer.next().unwrap() {}
    drop(peer);
    // Its memory is free then.
    until("the model's memory is free", || {
        let region = exchange.pool().take(manifest.data_bytes()).unwrap();
        let is_it = region.bytes().as_ptr() == place;
        exchange.pool().give_back(region);
        is_it
    });
}

#[test]
fn fetching_takes_no_memory_of_the_exchange() {
    let exchange = patient();
    let model = parcel(&floats(), 1, exchange.pool());
    exchange.offer(secret(1), model);
    for _ in 0..3 {
        fetch(&line(&exchange, "c"), secret(1), &Arc::default()).unwrap();
    }
    // Fresh memory is zero.
    let region = exchange.pool().take(floats().data_bytes()).unwrap();
    assert!(region.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn whoever_knows_the_place_but_not_the_secret_gets_no_model() {
    let exchange = exchange(500);
    exchange.offer(secret(1), parcel(&floats(), 1, exchange.pool()));
    crate::peer::knock_without_secret(&exchange, secret(1).place());
    // Others are not disturbed.
    fetch(&line(&exchange, "c"), secret(1), &Arc::default()).unwrap();
    assert!(!exchange.has_met("eve"));
}

#[test]
fn a_call_tells_what_is_there() {
    let exchange = patient();
    exchange.offer(secret(1), parcel(&floats(), 1, exchange.pool()));
    exchange.expect(secret(2));
    call(&line(&exchange, "caller"), secret(1)).unwrap();
    call(&line(&exchange, "caller"), secret(2)).unwrap();
    assert!(exchange.has_met("caller"));
    let error = call(&line(&exchange, "stranger"), secret(3)).unwrap_err();
    assert!(matches!(error, ClientError::NotWanted { .. }), "{error}");
    assert!(!exchange.has_met("stranger"));
    let closed = line(&exchange, "caller");
    drop(exchange);
    let error = call(&closed, secret(1)).unwrap_err();
    assert!(matches!(error, ClientError::Dial { .. }), "{error}");
}

#[test]
fn a_region_of_the_wrong_size_takes_no_model() {
    let exchange = patient();
    exchange.offer(secret(1), parcel(&floats(), 1, exchange.pool()));
    let config = ClientConfig {
        name: "c".into(),
        examples: 0.0,
        secret: secret(1),
        tls: None,
        send_path: None,
        receive_path: ReceiveKind::default(),
        congestion: Congestion::Auto,
        deadline: PATIENCE,
        reconnect: None,
    };
    let mut client = Client::join_unknowing(exchange.address(), config).unwrap();
    let Task::Download { round, digest } = client.next_task().unwrap() else { panic!("no model") };
    let mut region = Region::new(floats().data_bytes() - 1).unwrap();
    let error = client.download(round, digest, Target::Region(&mut region)).unwrap_err();
    assert!(error.to_string().contains("4000003 bytes and the model 4000004"), "{error}");
}

#[test]
fn a_parcel_of_the_wrong_size_is_refused() {
    let pool = Arc::default();
    let region = Region::new(floats().data_bytes() - 1).unwrap();
    let error = Parcel::new(floats(), region, &pool).err().unwrap();
    assert!(error.to_string().contains("4000003 bytes and the model 4000004"), "{error}");
    let region = Region::new(4096).unwrap();
    for position in [0, u64::MAX - 8192, 1 << 63] {
        let file = region.file().as_fd().try_clone_to_owned().unwrap();
        let error = Parcel::adopt(floats(), file, position).err().unwrap();
        assert!(error.to_string().contains("the file is too short"), "{position}: {error}");
    }
}
