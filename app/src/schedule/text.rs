//! A schedule as a table for the terminal: a row for each rank, time to the right, drawn to scale.

mod table;

use super::numbers::{letters, short};
use super::{Planned, summary};
use anstream::{AutoStream, ColorChoice};
use anstyle::{Ansi256Color, Style};
use burn_megatron::pipeline::Kind;
use std::io::IsTerminal;
use table::Table;

/// Shades from the first chunk to the last, dark to light; white is readable on the first two,
/// black on the others.
const BLUES: [u8; 4] = [25, 32, 75, 153];
const GREENS: [u8; 4] = [28, 34, 77, 157];
const BLACK: u8 = 16;
const WHITE: u8 = 231;
const GREY: u8 = 244;

/// How a table looks.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Whether kinds and chunks are colours, rather than letters.
    pub colour: bool,
    /// Columns of the terminal; without one, nothing is wrapped.
    pub width: Option<usize>,
}

impl Look {
    /// For files and pipes.
    pub const PLAIN: Look = Look {
        colour: false,
        width: None,
    };

    /// As fits standard output, and the user's `NO_COLOR`.
    pub fn of_stdout() -> Self {
        let stdout = std::io::stdout();
        let colour = AutoStream::choice(&stdout) != ColorChoice::Never;
        let columns = || std::env::var("COLUMNS").ok()?.parse().ok();
        let measured = || terminal_size::terminal_size_of(&stdout);
        let width = || {
            measured()
                .map(|(width, _)| usize::from(width.0))
                .or_else(columns)
        };
        Look {
            colour,
            width: stdout.is_terminal().then(width).flatten(),
        }
    }

    /// The style of a chunk's forwards or backwards.
    fn style(self, kind: Kind, chunk: usize, chunks: usize) -> Style {
        if !self.colour {
            return Style::new();
        }
        let last = BLUES.len() - 1;
        let shade = match chunks {
            1 => 1,
            // Chunks may be more than shades.
            _ => (chunk * last + (chunks - 1) / 2) / (chunks - 1),
        };
        let background = match kind {
            Kind::Backward => GREENS[shade],
            _ => BLUES[shade],
        };
        let text = if shade < 2 { WHITE } else { BLACK };
        Style::new()
            .bg_color(Some(Ansi256Color(background).into()))
            .fg_color(Some(Ansi256Color(text).into()))
    }

    fn idle(self) -> Style {
        let grey = self.colour.then_some(Ansi256Color(GREY).into());
        Style::new().fg_color(grey)
    }

    /// What a block says: `F3`, with chunks `F3a`; what colours show is left out.
    fn label(self, kind: Kind, microbatch: usize, chunk: usize, chunks: usize) -> String {
        let letter = match (self.colour, kind) {
            (true, _) => "",
            (false, Kind::Backward) => "B",
            (false, _) => "F",
        };
        let shades_suffice = self.colour && chunks <= BLUES.len();
        let chunk = match chunks == 1 || shades_suffice {
            true => String::new(),
            false => letters(chunk),
        };
        format!("{letter}{microbatch}{chunk}")
    }
}

/// The table, with what it shows above and what it costs below.
pub fn text(planned: &Planned, look: Look) -> String {
    format!(
        "{}\n\n{}{}\n\n{}",
        header(planned),
        Table::new(planned, look).draw(),
        legend(planned, look),
        summary::lines(planned)
    )
}

fn header(planned: &Planned) -> String {
    let (shape, times) = (planned.schedule.shape(), planned.times);
    format!(
        "{}: p = {} ranks, v = {} on each, m = {} micro batches; forward {}, backward {}, p2p {} \
         units of time",
        planned.kind,
        shape.ranks,
        match shape.virtual_stages {
            1 => "1 stage".into(),
            v => format!("{v} stages"),
        },
        shape.microbatches,
        short(times.forward),
        short(times.backward),
        short(times.p2p),
    )
}

fn legend(planned: &Planned, look: Look) -> String {
    let chunks = planned.schedule.shape().virtual_stages;
    let last = planned.schedule.shape().microbatches - 1;
    let sample = |kind, chunk| {
        let (style, label) = (
            look.style(kind, chunk, chunks),
            look.label(kind, last, chunk, chunks),
        );
        format!("{style}{label}{style:#} ")
    };
    let all = |kind| {
        let samples = (0..chunks)
            .take(BLUES.len())
            .map(|chunk| sample(kind, chunk));
        samples.collect::<String>()
    };
    let of_chunks = match chunks {
        1 => String::new(),
        2 => " on the rank's first and second stage".into(),
        _ => " on the rank's first, second, .. stage".into(),
    };
    let idle = look.idle();
    format!(
        "{}forward and {}backward of micro batch {last}{of_chunks}, {idle}..{idle:#} idle",
        all(Kind::Forward),
        all(Kind::Backward),
    )
}

#[cfg(test)]
mod tests;
