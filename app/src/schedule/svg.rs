//! A timeline as a picture, like the figures of the Megatron papers (arXiv:2104.04473, figure 4): a
//! row for each rank, time to the right, forwards blue and backwards green.

mod colours;

use super::numbers::{round_up, short, stages};
use burn_megatron::pipeline::{Kind, Span, Timeline};
use burn_megatron::topology::PipelineShape;
use colours::Fill;
use std::fmt::Write;

/// Pixels of the average block, and of the whole chart at most.
const BLOCK: f64 = 36.0;
const WIDEST: f64 = 30_000.0;
/// Pixels of a row, and from one row to the next.
const ROW: f64 = 30.0;
const ROW_STEP: f64 = 36.0;
/// Pixels around the chart.
const MARGIN: f64 = 24.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 92.0;
/// Pixels from one number of the time axis to the next, at least.
const TICK: f64 = 70.0;
/// Pixels that a character takes, for each pixel of its size; generous, as fonts differ.
const CHARACTER: f64 = 0.62;
const TITLE_SIZE: f64 = 17.0;
const TEXT_SIZE: f64 = 13.0;
const SMALL_SIZE: f64 = 11.0;

/// What to draw.
pub struct Picture<'a> {
    pub title: String,
    pub timeline: &'a Timeline,
    pub shape: &'a PipelineShape,
    /// The timeline's unit of time, such as `ms`.
    pub unit: &'a str,
}

/// A picture that stands by itself: no scripts, no fonts, and a white ground of its own.
pub fn svg(picture: &Picture) -> String {
    Canvas::new(picture).draw()
}

/// The picture and where things are in it, in pixels.
struct Canvas<'a> {
    picture: &'a Picture<'a>,
    /// When the timeline starts, and how long it is, in its unit.
    start: f64,
    makespan: f64,
    /// Where time starts.
    left: f64,
    per_unit: f64,
    width: f64,
    height: f64,
}

impl<'a> Canvas<'a> {
    fn new(picture: &'a Picture<'a>) -> Self {
        let Picture {
            timeline, shape, ..
        } = *picture;
        let ranks = timeline.ranks.len();
        let blocks: usize = (0..ranks).map(|rank| timeline.compute(rank).count()).sum();
        let busy: f64 = (0..ranks).map(|rank| timeline.busy(rank)).sum();
        let (start, makespan) = (timeline.start(), timeline.makespan());
        let per_unit = match busy > 0.0 {
            true => (BLOCK * blocks as f64 / busy).min(WIDEST / makespan),
            false => 1.0,
        };
        let name = |rank| {
            let (name, detail) = name_of(shape, rank);
            name.len().max(detail.len())
        };
        let axis = axis_name(picture).len();
        let names = (0..ranks).map(name).fold(axis, usize::max);
        let left = MARGIN + names as f64 * TEXT_SIZE * CHARACTER + 10.0;
        let title = picture.title.len() as f64 * TITLE_SIZE * CHARACTER;
        let legend = colours::legend(shape).len() as f64 * 150.0 + 40.0;
        Canvas {
            picture,
            start,
            makespan,
            left,
            per_unit,
            width: (left + per_unit * makespan + MARGIN).max(title.max(legend) + 2.0 * MARGIN),
            height: TOP + ranks as f64 * ROW_STEP + BOTTOM,
        }
    }

    fn draw(&self) -> String {
        let (w, h) = (self.width, self.height);
        let title = escaped(&self.picture.title);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w:.0} {h:.0}\" \
             width=\"{w:.0}\" height=\"{h:.0}\" font-family=\"Helvetica, Arial, sans-serif\" \
             font-size=\"{TEXT_SIZE}\" fill=\"{ink}\">\n<title>{title}</title>\n{hatch}\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text x=\"{MARGIN}\" y=\"36\" font-size=\"{TITLE_SIZE}\" font-weight=\"bold\">{title}\
             </text>\n",
            ink = colours::INK,
            hatch = colours::HATCH,
        );
        let ranks = 0..self.picture.timeline.ranks.len();
        let rows = ranks.map(|rank| self.row(rank));
        svg.extend(rows.chain([self.axis(), self.legend(), "</svg>\n".into()]));
        svg
    }

    /// A rank's name, and its idle time as what no block covers.
    fn row(&self, rank: usize) -> String {
        let y = TOP + rank as f64 * ROW_STEP;
        let (name, detail) = name_of(self.picture.shape, rank);
        let right = self.left - 10.0;
        let middle = y + ROW / 2.0;
        let mut row = match detail.is_empty() {
            true => text(right, middle + 4.5, "text-anchor=\"end\"", &name),
            false => {
                let small = "text-anchor=\"end\" font-size=\"10\"";
                text(right, middle - 2.0, "text-anchor=\"end\"", &name)
                    + &text(right, middle + 11.0, small, &detail)
            }
        };
        let width = self.per_unit * self.makespan;
        let _ = writeln!(
            row,
            "<rect class=\"idle\" x=\"{:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{ROW}\" \
             fill=\"url(#idle)\"/>\n<g stroke=\"{}\" stroke-width=\"0.7\" text-anchor=\"middle\" \
             font-size=\"{SMALL_SIZE}\">",
            self.left,
            colours::INK,
        );
        let spans = self.picture.timeline.compute(rank);
        row.extend(spans.map(|span| self.block(span, y)));
        row + "</g>\n"
    }

    /// A forward or backward; its number if there is room; what it is for who points at it.
    fn block(&self, span: &Span, y: f64) -> String {
        let shape = self.picture.shape;
        let (action, chunk) = (span.action, shape.chunk_of(span.action.stage));
        let Fill { ground, text } = Fill::of(action.kind, chunk, shape.virtual_stages);
        let (start, width) = (self.x(span.start), self.per_unit * span.duration());
        let letter = match action.kind {
            Kind::Backward => 'B',
            _ => 'F',
        };
        let since = span.start - self.start;
        let mut block = format!(
            "<rect class=\"{letter}\" x=\"{start:.2}\" y=\"{y}\" width=\"{width:.2}\" \
             height=\"{ROW}\" fill=\"{ground}\"><title>{letter}{}, stage {}: {} to {} {}</title>\
             </rect>",
            action.microbatch,
            action.stage,
            short(since),
            short(since + span.duration()),
            escaped(self.picture.unit),
        );
        let number = action.microbatch.to_string();
        if number.len() as f64 * SMALL_SIZE * CHARACTER + 2.0 <= width {
            let _ = write!(
                block,
                "<text x=\"{:.2}\" y=\"{}\" fill=\"{text}\" stroke=\"none\" \
                 pointer-events=\"none\">{number}</text>",
                start + width / 2.0,
                y + ROW / 2.0 + 4.0,
            );
        }
        block.push('\n');
        block
    }

    fn axis(&self) -> String {
        let y = TOP + self.picture.timeline.ranks.len() as f64 * ROW_STEP + 4.0;
        let end = self.left + self.per_unit * self.makespan;
        let mut axis = format!(
            "<g stroke=\"{ink}\" fill=\"none\"><path d=\"M{:.2} {y}H{end:.2}\"/>",
            self.left,
            ink = colours::INK,
        );
        let mut numbers = String::new();
        let step = round_up(TICK / self.per_unit);
        for tick in 0.. {
            let time = f64::from(tick) * step;
            if time > self.makespan * (1.0 + 1e-9) {
                break;
            }
            let x = self.left + self.per_unit * time;
            let _ = write!(axis, "<path d=\"M{x:.2} {y}v5\"/>");
            numbers += &text(x, y + 19.0, "text-anchor=\"middle\"", &short(time));
        }
        let name = axis_name(self.picture);
        numbers += &text(self.left - 10.0, y + 19.0, "text-anchor=\"end\"", &name);
        format!("{axis}</g>\n<g font-size=\"{SMALL_SIZE}\">{numbers}</g>\n")
    }

    fn legend(&self) -> String {
        let y = self.height - 34.0;
        let entries = colours::legend(self.picture.shape);
        let mut x = MARGIN;
        let mut legend = String::new();
        for (ground, name) in &entries {
            let _ = write!(
                legend,
                "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"22\" height=\"14\" fill=\"{ground}\" \
                 stroke=\"{}\" stroke-width=\"0.7\"/>",
                colours::INK
            );
            legend += &text(x + 28.0, y + 11.5, "", name);
            x += 28.0 + name.len() as f64 * TEXT_SIZE * CHARACTER + 16.0;
        }
        legend
    }

    fn x(&self, time: f64) -> f64 {
        self.left + self.per_unit * (time - self.start)
    }
}

/// What stands at a rank's row: its name, and under it its stages where they are several.
fn name_of(shape: &PipelineShape, rank: usize) -> (String, String) {
    let detail = match shape.virtual_stages {
        1 => String::new(),
        _ => stages(shape, rank),
    };
    (format!("rank {rank}"), detail)
}

fn axis_name(picture: &Picture) -> String {
    format!("time ({})", picture.unit)
}

fn text(x: f64, y: f64, attributes: &str, content: &str) -> String {
    let content = escaped(content);
    format!("<text x=\"{x:.2}\" y=\"{y:.2}\" {attributes}>{content}</text>\n")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests;
