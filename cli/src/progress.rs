//! Progress bars on a terminal. In a pipe there are none: the lines of each phase say enough.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// One bar: its label, its length, and how to read its position.
pub struct Bar {
    /// What it shows.
    pub label: String,
    /// Bytes at its end.
    pub total_bytes: u64,
    /// Bytes so far.
    pub position: Box<dyn Fn() -> u64 + Send>,
}

/// Draws bars until it is dropped.
pub struct Progress {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    /// Draws `bars` on the standard error, if it is a terminal.
    pub fn show(bars: Vec<Bar>, wanted: bool) -> Progress {
        let stop = Arc::new(AtomicBool::new(false));
        if !wanted || !std::io::stderr().is_terminal() {
            return Progress { stop, thread: None };
        }
        let stopped = stop.clone();
        // A host that refuses the thread gets no bars, and its round all the same.
        let thread = std::thread::Builder::new().spawn(move || draw(&bars, &stopped)).ok();
        Progress { stop, thread }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Nobody needs the bars any more.
            let _ = thread.join();
        }
    }
}

fn draw(bars: &[Bar], stop: &AtomicBool) {
    let all = MultiProgress::new();
    let style = ProgressStyle::with_template(
        "{prefix:24!} {wide_bar} {decimal_bytes:>9}/{decimal_total_bytes} {decimal_bytes_per_sec:>12} {eta:>4}",
    )
    .unwrap_or_else(|_| ProgressStyle::default_bar());
    let drawn: Vec<ProgressBar> = bars
        .iter()
        .map(|bar| {
            let drawn = all.add(ProgressBar::new(bar.total_bytes).with_style(style.clone()));
            drawn.set_prefix(bar.label.clone());
            drawn
        })
        .collect();
    while !stop.load(Ordering::Relaxed) {
        for (bar, drawn) in bars.iter().zip(&drawn) {
            drawn.set_position((bar.position)().min(bar.total_bytes));
        }
        std::thread::park_timeout(Duration::from_millis(100));
    }
    // The lines that are printed next say what the bars ended with.
    let _ = all.clear();
}
