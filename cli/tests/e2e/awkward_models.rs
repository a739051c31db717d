//! Models that no one trains and every program should survive.

use crate::models::{Layout, Tensor, every_dtype};
use crate::python::Python;
use crate::session::{average, average_exactly, two_members};

fn whole(tensors: &[Tensor<'_>]) {
    average_exactly(&Layout::new(tensors, None), &["--chunk-bytes=4KiB", "--rounds=2"], &[]);
}

#[test]
fn no_tensors_at_all() {
    whole(&[]);
    average_exactly(&Layout::new(&[], Some(r#"{"format":"pt"}"#)), &["--streams=5"], &[]);
}

#[test]
fn tensors_without_elements_only() {
    whole(&[("a", "F32", &[0]), ("b", "I64", &[3, 0, 2])]);
}

#[test]
fn a_model_of_one_byte() {
    whole(&[("byte", "U8", &[1])]);
    whole(&[("flag", "BOOL", &[])]);
}

#[test]
fn one_scalar() {
    whole(&[("scalar", "F64", &[])]);
}

#[test]
fn one_tensor_that_is_no_multiple_of_a_chunk() {
    whole(&[("odd", "F32", &[3 * 1024 + 1])]);
    whole(&[("odd", "U8", &[4095])]);
    whole(&[("odd", "BF16", &[4097])]);
}

#[test]
fn dtypes_that_share_chunks_with_nothing_and_lie_at_odd_places() {
    let layout = every_dtype();
    assert_eq!((8 + layout.header.len()) % 2, 1, "the data should begin at an odd place");
    average_exactly(&layout, &["--streams=5", "--chunk-bytes=4KiB"], &[]);
}

#[test]
fn thousands_of_tiny_tensors() {
    let names: Vec<String> = (0..6000).map(|index| format!("layer.{index}.scale")).collect();
    let shapes: [&[u64]; 4] = [&[1], &[3], &[], &[2, 2]];
    let dtypes = ["F32", "U8", "BF16", "F64", "F32"];
    let tensors: Vec<Tensor<'_>> = names
        .iter()
        .enumerate()
        .map(|(index, name)| (name.as_str(), dtypes[index % 5], shapes[index % 4]))
        .collect();
    average_exactly(&Layout::new(&tensors, None), &["--chunk-bytes=4KiB"], &[]);
}

#[test]
fn names_from_every_script() {
    whole(&[
        ("gewicht.größe", "F32", &[5]),
        ("слой.0", "F32", &[6]),
        ("層/重み", "BF16", &[7]),
        ("🦀 with spaces\tand \"quotes\"\\", "F32", &[8]),
        ("", "F32", &[2]),
    ]);
}

#[test]
fn large_metadata() {
    let metadata = format!(r#"{{"training log":"{}"}}"#, "loss 0.25; ".repeat(200_000));
    let layout = Layout::new(&[("weight", "F32", &[77])], Some(&metadata));
    assert!(layout.header.len() > 2_000_000);
    average_exactly(&layout, &[], &[]);
}

/// In the header the last tensor comes first, and the fields of each are in another order too.
fn backwards() -> Layout {
    let header = r#" {"last":{"data_offsets":[25,37],"shape":[3],"dtype":"F32"},
        "middle":{"shape":[5],"data_offsets":[20,25],"dtype":"U8"},
        "__metadata__":{"format":"pt"},
        "first":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}   "#;
    Layout::with_header(header, vec![("F32".into(), 5), ("U8".into(), 5), ("F32".into(), 3)])
}

#[test]
fn a_header_in_another_order_than_the_data() {
    average_exactly(&backwards(), &["--rounds=2"], &[]);
}

#[test]
fn the_official_library_agrees_on_them() {
    let Some(python) = Python::or_skip() else { return };
    let empty = Layout::new(&[], None);
    let nothing = Layout::new(&[("nothing", "F32", &[0]), ("scalar", "I64", &[])], None);
    for layout in [empty, nothing, every_dtype(), aligned(&backwards())] {
        let directory = tempfile::tempdir().unwrap();
        let members = two_members(&layout, directory.path());
        let ended = average(directory.path(), &members, &["--order=client"], &[]);
        let files: Vec<_> =
            members.iter().map(|m| (m.model.clone(), m.examples.as_str())).collect();
        python.check_mean("bits", &ended.model, &files);
    }
}

/// The official library refuses a header that does not begin with a brace.
fn aligned(layout: &Layout) -> Layout {
    let mut layout = layout.clone();
    layout.header.remove(0);
    layout
}
