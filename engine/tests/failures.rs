//! docs/FAILURES.md has an entry for every error text, and none for texts that do not exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// In the texts and in the entries: what differs from case to case.
const GAP: &str = "…";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().into()
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(repository().join(path)).unwrap()
}

/// The sources in a directory, without those below it.
fn sources(directory: &str) -> Vec<String> {
    let entries = repository().join(directory).read_dir().unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let rust = paths.filter(|path| path.extension().is_some_and(|end| end == "rs"));
    rust.map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

/// The texts of `#[error("...")]`, with a gap for every argument.
fn engine_texts() -> BTreeSet<String> {
    let sources = sources("engine/src/error");
    assert!(sources.len() >= 2, "the errors have moved");
    sources.iter().flat_map(|source| literals_after(source, "#[error(", 1)).collect()
}

/// The texts that the command adds to those of the engine.
fn command_texts() -> BTreeSet<String> {
    let sources = sources("cli/src");
    let markers = [("bail!(", 1), ("context(", 20), ("ensure!(", 120)];
    let each = |source: &String| {
        markers.into_iter().flat_map(|(marker, far)| literals_after(source, marker, far)).collect()
    };
    sources.iter().flat_map(|source: &String| -> Vec<String> { each(source) }).collect()
}

/// The string literals that begin at most `far` characters after a marker, white space not counted.
fn literals_after(source: &str, marker: &str, far: usize) -> Vec<String> {
    let after = source.match_indices(marker).map(|(at, _)| &source[at + marker.len()..]);
    after.filter_map(|rest| literal(rest, far)).filter(|text| has_words(text)).collect()
}

fn literal(rest: &str, far: usize) -> Option<String> {
    let begin = rest.find('"')?;
    let between = rest[..begin].chars().filter(|c| !c.is_whitespace()).count();
    (between < far).then(|| with_gaps(&rest[begin + 1..]))
}

/// Reads a literal up to its closing quote.
fn with_gaps(literal: &str) -> String {
    let mut text = String::new();
    let mut rest = literal.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '"' => break,
            '\\' if rest.peek() == Some(&'\n') => {
                while rest.next_if(|c| c.is_whitespace()).is_some() {}
            }
            '\\' => text.extend(rest.next()),
            '{' => {
                while rest.next().is_some_and(|c| c != '}') {}
                text += GAP;
            }
            c => text.push(c),
        }
    }
    text
}

/// A text of gaps alone passes on what another error says.
fn has_words(text: &str) -> bool {
    text.chars().any(char::is_alphanumeric)
}

/// The code at the start of each item of a list. Entries may go over several lines.
fn entries(document: &str) -> BTreeSet<String> {
    let items = document.split("\n- ").skip(1).filter_map(|item| {
        let item = item.split("\n\n").next()?.replace("\n  ", " ");
        let text = item.strip_prefix('`')?;
        // A text may itself quote a command, so its last backtick ends it.
        let end = text.find("`: ").or_else(|| text.rfind('`'))?;
        Some(text[..end].to_string())
    });
    items.collect()
}

#[test]
fn every_error_text_has_an_entry() {
    let entries = entries(&read("docs/FAILURES.md"));
    let texts: BTreeSet<String> = engine_texts().into_iter().chain(command_texts()).collect();
    assert!(texts.len() > 100, "{} texts found", texts.len());
    let missing: Vec<_> = texts.difference(&entries).collect();
    assert!(missing.is_empty(), "docs/FAILURES.md does not have: {missing:#?}");
}

#[test]
fn every_entry_is_an_error_text() {
    let document = read("docs/FAILURES.md");
    // The sections behind are about other programs' texts.
    let (ours, _) = document.split_once("\n## Python").unwrap();
    let texts: BTreeSet<String> = engine_texts().into_iter().chain(command_texts()).collect();
    let entries = entries(ours);
    let stale: Vec<_> =
        entries.iter().filter(|entry| !texts.contains(*entry) && has_words(entry)).collect();
    assert!(stale.is_empty(), "nothing says: {stale:#?}");
}

#[test]
fn literals_are_read_as_the_compiler_reads_them() {
    let source = r#"#[error("a \"b\" {c:?} and {} \
        more", d)] #[error(transparent)] #[error(
        "{x}"
    )] #[error("last: {0}")]"#;
    assert_eq!(literals_after(source, "#[error(", 1), ["a \"b\" … and … more", "last: …"]);
}
