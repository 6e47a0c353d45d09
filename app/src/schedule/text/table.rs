//! The table's rows, its scale, and its division into bands that fit a terminal.

use super::super::Planned;
use super::super::numbers::{round_up, short, stages};
use super::Look;
use anstyle::Style;
use burn_megatron::pipeline::{Kind, Span};
use std::ops::Range;

/// A block is at most about this many times as wide as its label needs, on average over the row.
const SPREAD: usize = 20;
/// Columns from one number of the time axis to the next, at least.
const TICK: f64 = 9.0;
/// A terminal is taken to be no narrower than this.
const LEAST_WIDTH: usize = 24;
/// Lines of the bands that are shown of a very long schedule, about.
const LINES: usize = 100;
/// Against a half that is a hair less.
const HAIR: f64 = 1e-6;

pub struct Table {
    look: Look,
    rows: Vec<Row>,
    /// Columns of a row's name.
    name_width: usize,
    /// Columns of a row's time.
    columns: usize,
    per_unit: f64,
    /// Columns of the shortest blocks.
    least_block: usize,
}

struct Row {
    name: String,
    blocks: Vec<Block>,
}

/// A forward or backward and the columns it takes.
struct Block {
    columns: Range<usize>,
    kind: Kind,
    label: String,
    style: Style,
}

impl Table {
    pub fn new(planned: &Planned, look: Look) -> Self {
        let (shape, timeline) = (planned.schedule.shape(), &planned.timeline);
        let (least_block, per_unit) = scale(planned, look);
        let start = timeline.start();
        let column = |time: f64| ((time - start) * per_unit + HAIR).round() as usize;
        let chunks = shape.virtual_stages;
        let block = |span: &Span| {
            let (kind, chunk) = (span.action.kind, shape.chunk_of(span.action.stage));
            Block {
                columns: column(span.start)..column(span.end),
                kind,
                label: look.label(kind, span.action.microbatch, chunk, chunks),
                style: look.style(kind, chunk, chunks),
            }
        };
        let row = |rank: usize| Row {
            name: match chunks {
                1 => format!("rank {rank}"),
                _ => format!("rank {rank}, {}", stages(shape, rank)),
            },
            blocks: timeline.compute(rank).map(block).collect(),
        };
        let rows: Vec<Row> = (0..shape.ranks).map(row).collect();
        let longest = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
        Table {
            look,
            rows,
            name_width: longest + 2,
            columns: column(start + timeline.makespan()),
            per_unit,
            least_block,
        }
    }

    /// All bands, one below the other; of very many, the first and the last ones.
    pub fn draw(&self) -> String {
        let bands = self.bands();
        let shown = (LINES / (self.rows.len() + 2)).max(2);
        if bands.len() <= shown {
            return bands.into_iter().map(|band| self.band(band)).collect();
        }
        let (head, tail) = (shown.div_ceil(2), bands.len() - shown / 2);
        let draw = |bands: &[Range<usize>]| -> String {
            let drawn = bands.iter().map(|band| self.band(band.clone()));
            drawn.collect()
        };
        let time = |column: usize| short(column as f64 / self.per_unit);
        format!(
            "{}(time {} to {} left out; a file or a pipe gets it all)\n\n{}",
            draw(&bands[..head]),
            time(bands[head].start),
            time(bands[tail].start),
            draw(&bands[tail..])
        )
    }

    /// The columns of each band.
    fn bands(&self) -> Vec<Range<usize>> {
        let whole = match self.look.width {
            None => self.columns.max(1),
            Some(width) => {
                let room = width.max(self.name_width + LEAST_WIDTH) - self.name_width;
                // Most blocks start at multiples of the shortest one: cut there, they stay whole.
                (room - room % self.least_block).max(self.least_block)
            }
        };
        let starts = (0..self.columns).step_by(whole);
        starts
            .map(|start| start..self.columns.min(start + whole))
            .collect()
    }

    fn band(&self, band: Range<usize>) -> String {
        let mut text = self.axis(&band);
        for row in &self.rows {
            text += &format!("{:<1$}", row.name, self.name_width);
            self.row(&mut text, row, &band);
            // Blanks at the end show with colours alone.
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        text.push('\n');
        text
    }

    /// The time axis: `|10` stands over the column where 10 begins.
    fn axis(&self, band: &Range<usize>) -> String {
        let mut text = format!("{:<1$}", "time", self.name_width);
        let step = round_up(TICK / self.per_unit);
        let first = (band.start as f64 / self.per_unit / step - HAIR).ceil() as usize;
        for tick in first.. {
            let time = tick as f64 * step;
            let column = (time * self.per_unit + HAIR).round() as usize;
            let label = format!("|{}", short(time));
            if column + label.len() > band.end {
                break;
            }
            let at = self.name_width + column.saturating_sub(band.start);
            text += &format!("{:1$}{label}", "", at.saturating_sub(text.len()));
        }
        text.push('\n');
        text
    }

    fn row(&self, text: &mut String, row: &Row, band: &Range<usize>) {
        let idle = |text: &mut String, columns: usize| {
            let style = self.look.idle();
            if columns > 0 {
                *text += &format!("{style}{}{style:#}", ".".repeat(columns));
            }
        };
        let mut at = band.start;
        for block in &row.blocks {
            let from = block.columns.start.max(band.start);
            let to = block.columns.end.min(band.end);
            if from >= to {
                continue;
            }
            idle(text, from - at);
            let (style, inside) = (block.style, block.inside(from..to, self.look));
            *text += &format!("{style}{inside}{style:#}");
            at = to;
        }
        idle(text, band.end - at);
    }
}

impl Block {
    /// What the columns `visible` of the block say; a block cut in two says its label once. Without
    /// colours a line shows how long it goes on, and a blank where it ends.
    fn inside(&self, visible: Range<usize>, look: Look) -> String {
        let (columns, needed) = (visible.len(), self.label.len());
        let said_before = visible.start - self.columns.start >= needed;
        let label = match needed <= columns && !said_before {
            true => self.label.as_str(),
            false if needed <= self.columns.len() || look.colour => "",
            // Too narrow for its number.
            false if self.kind == Kind::Backward => "B",
            false => "F",
        };
        if look.colour {
            return format!("{label:<columns$}");
        }
        let ends = usize::from(visible.end == self.columns.end && columns > label.len());
        format!("{label:-<0$}{1:2$}", columns - ends, "", ends)
    }
}

/// Columns of the shortest block, and of a unit of time: the label fits into the shortest block,
/// and a blank behind it.
fn scale(planned: &Planned, look: Look) -> (usize, f64) {
    let (shape, times) = (planned.schedule.shape(), planned.times);
    let (chunks, last) = (shape.virtual_stages, shape.microbatches - 1);
    let least_block = look.label(Kind::Backward, last, chunks - 1, chunks).len() + 1;
    let computing = [times.forward, times.backward].into_iter();
    let shortest = computing
        .filter(|time| *time > 0.0)
        .fold(f64::INFINITY, f64::min);
    // One very long kind of block, or message, does not make the table endless.
    let blocks = 2 * chunks * (shape.microbatches + shape.ranks);
    let most = (SPREAD * least_block * blocks) as f64;
    let per_unit = (least_block as f64 / shortest).min(most / planned.timeline.makespan());
    (least_block, per_unit)
}
