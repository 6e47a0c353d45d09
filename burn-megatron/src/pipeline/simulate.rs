//! How long a schedule takes, from how long its parts take.

use super::schedule::{Action, Kind, Schedule};
use super::timeline::{Span, Timeline};
use crate::error::{Error, Result, Violation};
use crate::topology::PipelineShape;
use std::collections::HashMap;

/// How long each stage's forward and backward take, and a message between two ranks; in any one
/// unit of time.
#[derive(Debug, Clone, PartialEq)]
pub struct Durations {
    /// Of each stage, in pipeline order.
    pub forward: Vec<f64>,
    /// Of each stage, in pipeline order.
    pub backward: Vec<f64>,
    /// From the end of a computation to the moment its result is at the next rank. It does not keep
    /// either rank from computing.
    pub transfer: f64,
}

impl Durations {
    /// The same for every stage.
    pub fn equal(num_stages: usize, forward: f64, backward: f64, transfer: f64) -> Self {
        Durations {
            forward: vec![forward; num_stages],
            backward: vec![backward; num_stages],
            transfer,
        }
    }

    /// What the stages took in a measured timeline, on average; `transfer` is not measured.
    pub fn measured(timeline: &Timeline, num_stages: usize) -> Self {
        let mut durations = Durations::equal(num_stages, 0.0, 0.0, 0.0);
        let mut counts = vec![[0usize; 2]; num_stages];
        for span in (0..timeline.ranks.len()).flat_map(|rank| timeline.compute(rank)) {
            let backward = span.action.kind == Kind::Backward;
            counts[span.action.stage][usize::from(backward)] += 1;
            *durations.of_mut(&span.action) += span.duration();
        }
        for (stage, [forward, backward]) in counts.into_iter().enumerate() {
            durations.forward[stage] /= forward.max(1) as f64;
            durations.backward[stage] /= backward.max(1) as f64;
        }
        durations
    }

    fn of_mut(&mut self, compute: &Action) -> &mut f64 {
        match compute.kind {
            Kind::Backward => &mut self.backward[compute.stage],
            _ => &mut self.forward[compute.stage],
        }
    }

    fn of(&self, compute: &Action) -> f64 {
        match compute.kind {
            Kind::Backward => self.backward[compute.stage],
            _ => self.forward[compute.stage],
        }
    }
}

/// When each action starts and ends, the first at 0. Receives are posted where they stand and waited
/// for where they are needed, as the executor does; a receive's span is the message's way.
///
/// # Panics
/// If `durations` are not those of the schedule's number of stages.
pub fn simulate(schedule: &Schedule, durations: &Durations) -> Timeline {
    let shape = schedule.shape();
    let orders: Vec<Vec<Action>> = (0..shape.ranks)
        .map(|rank| schedule.compute(rank).collect())
        .collect();
    let played = play(shape, &orders, durations).expect("a schedule was checked");
    let by_action: HashMap<Action, Span> = (played.iter().flatten())
        .map(|span| (span.action, *span))
        .collect();
    let span_of = |action: &Action| {
        let (stage, kind) = match action.kind {
            Kind::Forward | Kind::Backward => return by_action[action],
            Kind::SendForward => (action.stage, Kind::Forward),
            Kind::ReceiveForward => (action.stage - 1, Kind::Forward),
            Kind::SendBackward => (action.stage, Kind::Backward),
            Kind::ReceiveBackward => (action.stage + 1, Kind::Backward),
        };
        let made = by_action[&Action::new(stage, kind, action.microbatch)].end;
        Span {
            action: *action,
            start: made,
            end: made + durations.transfer,
        }
    };
    let ranks = (0..shape.ranks)
        .map(|rank| schedule.actions(rank).iter().map(span_of).collect())
        .collect();
    Timeline { ranks }
}

/// Plays what the ranks compute: each starts its next as soon as it is free and has its input.
///
/// # Errors
/// If the ranks would wait for one another for ever.
pub(super) fn play(
    shape: &PipelineShape,
    orders: &[Vec<Action>],
    durations: &Durations,
) -> Result<Vec<Vec<Span>>> {
    assert!(
        [&durations.forward, &durations.backward]
            .iter()
            .all(|list| list.len() == shape.num_stages()),
        "one duration per stage"
    );
    let mut ends: HashMap<Action, f64> = HashMap::new();
    let mut spans: Vec<Vec<Span>> = vec![Vec::new(); shape.ranks];
    loop {
        let mut moved = false;
        for (order, spans) in orders.iter().zip(&mut spans) {
            while let Some(action) = order.get(spans.len()) {
                let arrived = match input_of(shape, action) {
                    None => Some(0.0),
                    Some(input) => ends.get(&input).map(|end| end + durations.transfer),
                };
                let Some(arrived) = arrived else { break };
                let free = spans.last().map_or(0.0, |span| span.end);
                let start = free.max(arrived);
                let end = start + durations.of(action);
                ends.insert(*action, end);
                spans.push(Span {
                    action: *action,
                    start,
                    end,
                });
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck = (orders.iter().zip(&spans).enumerate())
        .find_map(|(rank, (order, spans))| Some((rank, order.get(spans.len())?)));
    match stuck {
        None => Ok(spans),
        Some((rank, action)) => Err(Error::config(vec![Violation {
            rule: format!("the pipeline deadlocks: rank {rank} waits for the input of {action}"),
            nearest: Vec::new(),
        }])),
    }
}

/// The computation on the neighbouring stage whose result `action` starts from.
fn input_of(shape: &PipelineShape, action: &Action) -> Option<Action> {
    let receive = shape.receive_before(action)?;
    let stage = match receive.kind {
        Kind::ReceiveForward => action.stage - 1,
        _ => action.stage + 1,
    };
    Some(Action::new(stage, action.kind, action.microbatch))
}
