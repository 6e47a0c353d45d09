//! `megatron schedule`: draws what the ranks of a pipeline do, and says how long they idle.

pub mod chrome;
pub mod json;
pub mod numbers;
mod summary;
pub mod svg;
mod text;

use crate::cli::{ScheduleArgs, ScheduleFormat};
use crate::error::{Failure, Result};
use burn_megatron::pipeline::{Durations, Schedule, Timeline, simulate};
use burn_megatron::topology::{PipelineSchedule, PipelineShape};
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// The most ranks and forwards of a schedule that is drawn: more than a picture can show.
const MAX_RANKS: usize = 1 << 10;
const MAX_FORWARDS: usize = 1 << 16;
/// One unit of time in a Chrome trace, in its microseconds.
const MICROS_PER_UNIT: f64 = 1000.0;

/// Runs `megatron schedule`.
pub fn run(args: &ScheduleArgs) -> Result<()> {
    let planned = Planned::new(args)?;
    let content = match args.format {
        ScheduleFormat::Text => {
            let look = match args.output {
                None => text::Look::of_stdout(),
                Some(_) => text::Look::PLAIN,
            };
            text::text(&planned, look)
        }
        ScheduleFormat::Json => json::json(&planned.schedule),
        ScheduleFormat::Svg => svg::svg(&planned.picture()),
        ScheduleFormat::Chrome => format!("{}\n", planned.trace()),
    };
    match &args.output {
        Some(path) => fs::write(path, content).map_err(|error| Failure::io(path, &error)),
        None => print(&content),
    }
}

/// A schedule and how it would run.
struct Planned {
    kind: PipelineSchedule,
    schedule: Schedule,
    times: Times,
    timeline: Timeline,
}

/// Of every stage, in units.
#[derive(Debug, Clone, Copy)]
struct Times {
    forward: f64,
    backward: f64,
    p2p: f64,
}

impl Planned {
    fn new(args: &ScheduleArgs) -> Result<Self> {
        let times = Times {
            forward: args.forward_time,
            backward: args.backward_time,
            p2p: args.p2p_time,
        };
        if times.forward + times.backward <= 0.0 {
            return Err(Failure::usage(
                "with --forward-time 0 and --backward-time 0 there is nothing to draw",
                "give at least one of them a time above 0, in any unit",
            ));
        }
        let (kind, shape) = (args.kind(), args.shape());
        Planned::of_shape(kind, shape, times)
    }

    fn of_shape(kind: PipelineSchedule, shape: PipelineShape, times: Times) -> Result<Self> {
        let forwards = (shape.ranks.checked_mul(shape.virtual_stages))
            .and_then(|stages| stages.checked_mul(shape.microbatches));
        if shape.ranks > MAX_RANKS || forwards.is_none_or(|n| n > MAX_FORWARDS) {
            return Err(Failure::usage(
                format!(
                    "{} ranks of {} stage(s) with {} micro batches are too many to draw: at most \
                     {MAX_RANKS} ranks, and {MAX_FORWARDS} forwards of all stages",
                    shape.ranks, shape.virtual_stages, shape.microbatches
                ),
                "draw fewer: with more ranks or micro batches the picture only repeats itself",
            ));
        }
        let schedule = Schedule::new(kind, shape).map_err(|error| {
            let next = "change --pp, --micro-batches, --virtual or --schedule accordingly";
            Failure::usage(error.to_string(), next)
        })?;
        let Times {
            forward,
            backward,
            p2p,
        } = times;
        let durations = Durations::equal(shape.num_stages(), forward, backward, p2p);
        let timeline = simulate(&schedule, &durations);
        Ok(Planned {
            kind,
            schedule,
            times,
            timeline,
        })
    }

    fn picture(&self) -> svg::Picture<'_> {
        svg::Picture {
            title: summary::title(self),
            timeline: &self.timeline,
            shape: self.schedule.shape(),
            unit: "units",
        }
    }

    fn trace(&self) -> serde_json::Value {
        let shape = self.schedule.shape();
        let track = chrome::Track {
            name: format!("simulated {}", self.kind),
            timeline: &self.timeline,
            shape,
            rank_names: (0..shape.ranks)
                .map(|rank| format!("rank {rank}"))
                .collect(),
            micros_per_unit: MICROS_PER_UNIT,
        };
        let other = [
            ("schedule", summary::title(self)),
            ("time", "simulated; one unit is drawn as 1 ms".into()),
        ];
        let other = other.map(|(key, value)| (key.to_string(), value.into()));
        chrome::trace(&[track], other.into_iter().collect())
    }
}

/// Prints it; a reader that has seen enough and gone, such as `head`, is no failure.
fn print(content: &str) -> Result<()> {
    let mut stdout = anstream::stdout();
    let written = (stdout.write_all(content.as_bytes())).and_then(|()| stdout.flush());
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::io(Path::new("standard output"), &error))
        }
        _ => Ok(()),
    }
}

/// `p` ranks, `m` micro batches, `v` chunks, with a forward of 1 unit and a backward of 2.
#[cfg(test)]
fn planned(kind: PipelineSchedule, p: usize, m: usize, v: usize) -> Planned {
    let times = Times {
        forward: 1.0,
        backward: 2.0,
        p2p: 0.0,
    };
    let shape = PipelineShape::new(p, m).with_virtual_stages(v);
    Planned::of_shape(kind, shape, times).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        let times = Times {
            forward: 1.0,
            backward: 2.0,
            p2p: 0.0,
        };
        for (p, m) in [(0, 8), (4, 0), (usize::MAX, 2), (2048, 1), (1024, 1024)] {
            let shape = PipelineShape::new(p, m);
            let kind = PipelineSchedule::OneForwardOneBackward;
            assert!(Planned::of_shape(kind, shape, times).is_err(), "{p} {m}");
        }
    }
}
