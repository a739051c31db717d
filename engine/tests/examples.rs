//! The examples do what they say.

#[path = "../examples/one_process.rs"]
mod one_process;

#[test]
fn one_process_learns_the_weighted_mean() {
    one_process::main().unwrap();
}
