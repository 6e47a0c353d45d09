//! The last step's pipeline: what it took, beside what its schedule takes.

use super::plan::Plan;
use super::strategy::Ended;
use crate::error::{Failure, Result};
use crate::schedule::chrome::{self, Track};
use crate::schedule::numbers::percent;
use burn_megatron::pipeline::{Durations, Schedule, Timeline, simulate};
use burn_megatron::topology::Axis;
use serde_json::{Value, json};
use std::path::Path;

/// One replica's pipeline in one step.
struct Measured {
    /// World ranks, in pipeline order.
    ranks: Vec<usize>,
    /// In seconds.
    timeline: Timeline,
    /// What the schedule takes if every pass takes its stage's mean time of this step.
    simulated: Timeline,
}

/// The last step of every replica, and of each of its tensor-parallel ranks.
fn measured(plan: &Plan, ended: &Ended, schedule: &Schedule) -> Vec<Measured> {
    let grid = &plan.resolved.layout().grid;
    (grid.groups(&[Axis::Pp]).into_iter())
        .map(|ranks| {
            let spans = ranks.iter().map(|rank| ended.spans[*rank].clone());
            let timeline = Timeline {
                ranks: spans.collect(),
            };
            let durations = Durations::measured(&timeline, schedule.shape().num_stages());
            Measured {
                ranks,
                simulated: simulate(schedule, &durations),
                timeline,
            }
        })
        .collect()
}

/// What the pipeline will do in one line, where there is one.
pub fn planned(plan: &Plan) -> Option<String> {
    let (layout, schedule) = (plan.resolved.layout(), plan.resolved.pipeline_schedule());
    let shape = schedule.shape();
    if shape.ranks == 1 {
        return None;
    }
    let list = |of: &dyn Fn(usize) -> String| {
        let ranks: Vec<String> = (0..shape.ranks).map(of).collect();
        ranks.join(", ")
    };
    let layers = list(&|rank| {
        let stages = layout.stages_of(rank).map(|stage| stage.layers.len());
        let stages: Vec<String> = stages.map(|count| count.to_string()).collect();
        stages.join("+")
    });
    let held = list(&|rank| schedule.max_in_flight(rank).to_string());
    Some(format!(
        "{}, layers of each rank {layers}; {} micro batches a step, at most {held} in flight; bubble {} \
         with equal stages",
        layout.pipeline_schedule,
        shape.microbatches,
        percent(shape.equal_bubble())
    ))
}

/// The bubble of the first replica's last step in one line, where there is a pipeline.
pub fn line(plan: &Plan, ended: &Ended) -> Option<String> {
    let schedule = ended.schedule.as_ref()?;
    let shape = *schedule.shape();
    if shape.ranks == 1 {
        return None;
    }
    let all = measured(plan, ended, schedule);
    let first = all.first()?;
    Some(format!(
        "bubble of the last step {} of its computing time ({} simulated from its passes, {} with equal \
         stages)",
        percent(first.timeline.bubble()),
        percent(first.simulated.bubble()),
        percent(shape.equal_bubble())
    ))
}

/// Writes the last step's trace, measured and simulated side by side for each replica.
///
/// # Errors
/// The file could not be written.
pub fn write_trace(plan: &Plan, ended: &Ended, path: &Path) -> Result<()> {
    let Some(schedule) = &ended.schedule else {
        return Ok(());
    };
    let shape = schedule.shape();
    let all = measured(plan, ended, schedule);
    let track = |name: &str, one: &Measured, timeline| Track {
        name: format!("{name}, pipeline of rank {}", one.ranks[0]),
        timeline,
        shape,
        rank_names: one
            .ranks
            .iter()
            .map(|rank| format!("rank {rank}"))
            .collect(),
        micros_per_unit: 1e6,
    };
    let tracks: Vec<Track<'_>> = (all.iter())
        .flat_map(|one| {
            [
                track("measured", one, &one.timeline),
                track("simulated", one, &one.simulated),
            ]
        })
        .collect();
    let bubbles = |of: fn(&Measured) -> &Timeline| -> Value {
        all.iter().map(|one| of(one).bubble()).collect()
    };
    let iteration = ended.history.last.as_ref().map(|last| last.iteration);
    let other = [
        ("layout", json!(plan.resolved.layout().to_string())),
        ("schedule", json!(plan.resolved.layout().pipeline_schedule)),
        ("iteration", json!(iteration)),
        ("bubble_measured", bubbles(|one| &one.timeline)),
        ("bubble_simulated", bubbles(|one| &one.simulated)),
        (
            "bubble",
            json!("idle time in parts of computing time, of each pipeline in turn"),
        ),
        (
            "simulated",
            json!("the schedule, each pass taking its stage's mean time of this step"),
        ),
    ];
    let other = other.map(|(key, value)| (key.to_string(), value));
    let trace = chrome::trace(&tracks, other.into_iter().collect());
    std::fs::write(path, format!("{trace}\n")).map_err(|e| Failure::io(path, &e))
}
