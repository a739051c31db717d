//! Lays the report out for people, 80 columns wide.

use anstyle::{AnsiColor, Style};
use textwrap::{Options, WordSplitter};

/// Width of the report: that of the narrowest terminal in common use.
const COLUMNS: usize = 80;

/// Where the names begin, after the mark.
const NAME_COLUMN: usize = 7;

/// Where the text begins, after the name.
const TEXT_COLUMN: usize = 30;

/// What a line says about its subject.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// It works, or is as it should be.
    Ok,
    /// It does not work.
    Off,
    /// Worth knowing.
    Note,
}

impl Mark {
    fn word(self) -> &'static str {
        match self {
            Mark::Ok => "ok",
            Mark::Off => "off",
            Mark::Note => "note",
        }
    }

    fn style(self) -> Style {
        let color = match self {
            Mark::Ok => AnsiColor::Green,
            Mark::Off => AnsiColor::Red,
            Mark::Note => AnsiColor::Yellow,
        };
        color.on_default()
    }
}

/// One subject.
pub struct Line {
    pub mark: Mark,
    pub name: &'static str,
    /// What there is to say; more than one paragraph where it needs explaining.
    pub texts: Vec<String>,
}

impl Line {
    pub fn new(mark: Mark, name: &'static str, text: impl Into<String>) -> Line {
        Line { mark, name, texts: vec![text.into()] }
    }

    /// Adds a paragraph.
    pub fn and(mut self, text: impl Into<String>) -> Line {
        self.texts.push(text.into());
        self
    }

    /// Adds what would change it, where that is known.
    pub fn helps(self, remedy: Option<&String>) -> Line {
        match remedy {
            Some(remedy) => self.and(format!("helps: {remedy}")),
            None => self,
        }
    }
}

/// Lines that belong together.
pub struct Section {
    pub title: &'static str,
    pub lines: Vec<Line>,
}

/// The whole report, with colours that the output stream takes out where they are not wanted.
pub fn text(sections: &[Section], verdict: &str) -> String {
    let bold = Style::new().bold();
    let mut text = String::new();
    for section in sections {
        text += &format!("{bold}{}{bold:#}\n", section.title);
        for line in &section.lines {
            text += &line_text(line);
        }
        text += "\n";
    }
    text + &wrap(verdict, 0) + "\n"
}

fn line_text(line: &Line) -> String {
    let style = line.mark.style();
    let mark = line.mark.word();
    let names = TEXT_COLUMN - NAME_COLUMN;
    let marks = NAME_COLUMN - 2 - mark.len();
    let mut text = format!("  {style}{mark}{style:#}{:marks$}{:<names$}", "", line.name);
    let mut paragraphs = line.texts.iter();
    if let Some(first) = paragraphs.next() {
        // It begins on the line of the name.
        text += wrap(first, TEXT_COLUMN).trim_start();
    }
    for paragraph in paragraphs {
        let longest = paragraph.split(' ').map(str::len).max().unwrap_or(0);
        let column = if TEXT_COLUMN + longest > COLUMNS { NAME_COLUMN } else { TEXT_COLUMN };
        text += "\n";
        text += &wrap(paragraph, column);
    }
    text + "\n"
}

/// Breaks `text` between words; a path or a command may not be broken within one.
fn wrap(text: &str, indent: usize) -> String {
    let indent = " ".repeat(indent);
    let options = Options::new(COLUMNS)
        .initial_indent(&indent)
        .subsequent_indent(&indent)
        .break_words(false)
        .word_splitter(WordSplitter::NoHyphenation);
    textwrap::fill(text, options)
}
