//! Flags of `megatron schedule`.

use super::by_name;
use burn_megatron::topology::{PipelineSchedule, PipelineShape};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Times outside of these, in units, are slips of the keyboard, and make pictures nobody can read.
const SHORTEST: f64 = 1e-9;
const LONGEST: f64 = 1e9;

/// The pipeline to draw.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct ScheduleArgs {
    /// Pipeline ranks (p): each holds a part of the layers and passes activations to the next
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(visible_alias = "pipeline-model-parallel-size")]
    pub pp: usize,
    /// Micro batches of one optimizer step (m); the more, the smaller the share of time idled away
    #[arg(long, value_name = "M", default_value_t = 8)]
    #[arg(visible_alias = "num-microbatches")]
    pub micro_batches: usize,
    /// Stages on each rank (v), called its chunks; above 1, more messages buy a smaller bubble
    #[arg(long = "virtual", value_name = "V", default_value_t = 1)]
    #[arg(visible_alias = "num-virtual-stages-per-pipeline-rank")]
    pub virtual_stages: usize,
    /// Micro batches that a chunk runs in a row before the rank's next chunk has its turn; for
    /// interleaved alone [default: the number of ranks]
    #[arg(long, value_name = "G")]
    pub microbatch_group_size_per_virtual_pipeline_stage: Option<usize>,
    /// Order of the work: gpipe (all forwards, then all backwards), 1f1b (a backward as early as
    /// possible, to hold fewer activations) or interleaved (1f1b over the chunks of each rank)
    /// [default: 1f1b; interleaved with --virtual above 1]
    #[arg(long, value_name = "NAME", value_parser = by_name::<PipelineSchedule>)]
    #[arg(visible_alias = "pipeline-schedule")]
    pub schedule: Option<PipelineSchedule>,
    /// How long one stage computes the forward of one micro batch, in units of your choice. With
    /// virtual stages a stage is a chunk: halve the time for --virtual 2 to compare the two
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = time)]
    #[arg(allow_negative_numbers = true)]
    pub forward_time: f64,
    /// How long one stage computes the backward of one micro batch, in the same units
    #[arg(long, value_name = "X", default_value_t = 2.0, value_parser = time)]
    #[arg(allow_negative_numbers = true)]
    pub backward_time: f64,
    /// How long a message takes from one rank to the next, in the same units; ranks compute
    /// meanwhile, if they have something to compute
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = time)]
    #[arg(allow_negative_numbers = true)]
    pub p2p_time: f64,
    /// What to write: text (a table), json (what each rank computes, in order), svg (a picture) or
    /// chrome (a trace to open in Perfetto or chrome://tracing; one unit is drawn as 1 ms)
    #[arg(
        long,
        value_name = "FORMAT",
        default_value = "text",
        hide_possible_values = true
    )]
    pub format: ScheduleFormat,
    /// File to write to [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

// Described at the flag: with a description each, clap would spread the whole help over twice the
// lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScheduleFormat {
    Text,
    Json,
    Svg,
    Chrome,
}

impl ScheduleArgs {
    pub fn shape(&self) -> PipelineShape {
        PipelineShape {
            group_size: self.microbatch_group_size_per_virtual_pipeline_stage,
            ..PipelineShape::new(self.pp, self.micro_batches)
                .with_virtual_stages(self.virtual_stages)
        }
    }

    pub fn kind(&self) -> PipelineSchedule {
        let default = PipelineSchedule::default_for(self.virtual_stages);
        self.schedule.unwrap_or(default)
    }
}

/// Reads a time in units.
fn time(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(time) if time == 0.0 || (SHORTEST..=LONGEST).contains(&time) => Ok(time),
        _ => Err(format!(
            "a time is 0, or a number of units from {SHORTEST:e} to {LONGEST:e}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_finite_and_not_negative() {
        for (text, value) in [("0", 0.0), ("1", 1.0), ("2.5", 2.5), ("1e-3", 1e-3)] {
            assert_eq!(time(text), Ok(value));
        }
        for text in ["-1", "inf", "nan", "1e300", "1e-300", "", "2ms"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}
