//! Lines on standard output whose reader may go away.

/// Prints a line, as `println!` does, and does nothing where the reader has closed the pipe: a training
/// does not end because nobody listens any more.
macro_rules! say {
    ($($arg:tt)*) => {{
        let line = format!($($arg)*);
        let _ = std::io::Write::write_all(&mut std::io::stdout(), (line + "\n").as_bytes());
    }};
}

pub(crate) use say;
