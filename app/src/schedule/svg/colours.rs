//! The picture's colours: a hue for each kind, a shade for each chunk.

use super::PipelineShape;
use burn_megatron::pipeline::Kind;
use std::fmt;

/// Text and lines.
pub const INK: &str = "#222";
/// What idle time looks like.
pub const HATCH: &str = "<defs><pattern id=\"idle\" width=\"7\" height=\"7\" \
    patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
    <rect width=\"7\" height=\"7\" fill=\"#f3f3f3\"/>\
    <rect width=\"1.4\" height=\"7\" fill=\"#d4d4d4\"/></pattern></defs>";

/// The first chunk's shade and the last one's, in between they are mixed.
const BLUES: [Rgb; 2] = [Rgb(0x2f, 0x5f, 0xb3), Rgb(0xb4, 0xcf, 0xf5)];
const GREENS: [Rgb; 2] = [Rgb(0x3c, 0x8d, 0x40), Rgb(0xc3, 0xe8, 0xbb)];
/// A single chunk's shade, as a part of the way from the first to the last.
const SINGLE: f64 = 0.35;
/// The most shades in the legend; of more chunks it has the first and the last.
const MOST_SHADES: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rgb(u8, u8, u8);

/// The colour of a block and of the number in it.
pub struct Fill {
    pub ground: Rgb,
    pub text: &'static str,
}

impl Fill {
    /// That of a chunk's forwards or backwards.
    pub fn of(kind: Kind, chunk: usize, chunks: usize) -> Self {
        let [first, last] = match kind {
            Kind::Backward => GREENS,
            _ => BLUES,
        };
        let way = match chunks {
            1 => SINGLE,
            _ => chunk as f64 / (chunks - 1) as f64,
        };
        let ground = first.mixed(last, way);
        let text = if ground.is_dark() { "#fff" } else { INK };
        Fill { ground, text }
    }
}

impl Rgb {
    fn mixed(self, other: Rgb, way: f64) -> Rgb {
        let mix = |a: u8, b: u8| (f64::from(a) + way * (f64::from(b) - f64::from(a))).round() as u8;
        Rgb(
            mix(self.0, other.0),
            mix(self.1, other.1),
            mix(self.2, other.2),
        )
    }

    /// Whether white is the more readable on it, by its luma.
    fn is_dark(self) -> bool {
        let [r, g, b] = [self.0, self.1, self.2].map(f64::from);
        0.299 * r + 0.587 * g + 0.114 * b < 140.0
    }
}

impl fmt::Display for Rgb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:02x}{:02x}{:02x}", self.0, self.1, self.2)
    }
}

/// What the legend explains: a colour and its meaning, each.
pub fn legend(shape: &PipelineShape) -> Vec<(String, String)> {
    let chunks = shape.virtual_stages;
    let shown: Vec<usize> = match chunks {
        0..=MOST_SHADES => (0..chunks).collect(),
        _ => vec![0, chunks - 1],
    };
    let mut entries = Vec::new();
    for (kind, name) in [(Kind::Forward, "forward"), (Kind::Backward, "backward")] {
        for chunk in &shown {
            let of_chunk = match chunks {
                1 => String::new(),
                _ => format!(", chunk {chunk}"),
            };
            let ground = Fill::of(kind, *chunk, chunks).ground.to_string();
            entries.push((ground, format!("{name}{of_chunk}")));
        }
    }
    entries.push(("url(#idle)".into(), "idle".into()));
    entries
}
