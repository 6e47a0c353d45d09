//! Proves that a schedule leaves nothing out and cannot deadlock.

use super::{Action, Kind};
use crate::error::{Error, Result, Violation};
use crate::topology::PipelineShape;
use std::collections::{HashMap, HashSet};

/// Checks that every micro batch of every stage runs forward once and, where the schedule `trains`,
/// then backward once, on the stage's rank; that each starts from a message received before and its
/// result is sent after; that sends and receives meet in order; and that no rank waits for ever, even
/// where a send waits for its receive.
///
/// # Errors
/// The first of these that does not hold, with the rank and the action.
pub(super) fn check(shape: &PipelineShape, actions: &[Vec<Action>], trains: bool) -> Result<()> {
    let compute = |list: &Vec<Action>| list.iter().copied().filter(|a| a.kind.computes()).collect();
    let orders: Vec<Vec<Action>> = actions.iter().map(compute).collect();
    each_once(shape, &orders, trains)?;
    for (rank, list) in actions.iter().enumerate() {
        in_order(shape, rank, list)?;
    }
    run_blocking(shape, actions)
}

/// Every forward and backward exactly once, on its rank, the forward first.
pub(super) fn each_once(shape: &PipelineShape, orders: &[Vec<Action>], trains: bool) -> Result<()> {
    if orders.len() != shape.ranks {
        return refuse(format!(
            "a pipeline of {} ranks has {} lists of actions",
            shape.ranks,
            orders.len()
        ));
    }
    let mut done = HashSet::new();
    for (rank, order) in orders.iter().enumerate() {
        for action in order {
            let known = action.stage < shape.num_stages()
                && action.microbatch < shape.microbatches
                && shape.rank_of(action.stage) == rank
                && action.kind.computes();
            if !known {
                return refuse(format!("rank {rank} cannot run {action}"));
            }
            let forward = Action::new(action.stage, Kind::Forward, action.microbatch);
            if action.kind == Kind::Backward && !done.contains(&forward) {
                return refuse(format!("rank {rank} runs {action} before {forward}"));
            }
            if !done.insert(*action) {
                return refuse(format!("rank {rank} runs {action} twice"));
            }
        }
    }
    let kinds: &[Kind] = match trains {
        true => &[Kind::Forward, Kind::Backward],
        false => &[Kind::Forward],
    };
    for stage in 0..shape.num_stages() {
        for microbatch in 0..shape.microbatches {
            for kind in kinds {
                let action = Action::new(stage, *kind, microbatch);
                if !done.contains(&action) {
                    let rank = shape.rank_of(stage);
                    return refuse(format!("rank {rank} never runs {action}"));
                }
            }
        }
    }
    Ok(())
}

/// On one rank: a receive before the computation that needs it, a send after the one that made it,
/// each exactly once.
fn in_order(shape: &PipelineShape, rank: usize, list: &[Action]) -> Result<()> {
    let places: HashMap<Action, usize> = list.iter().enumerate().map(|(i, a)| (*a, i)).collect();
    if places.len() != list.len() {
        return refuse(format!("rank {rank} has an action twice"));
    }
    let mut messages = 0;
    for (place, action) in list.iter().enumerate().filter(|(_, a)| a.kind.computes()) {
        if let Some(receive) = shape.receive_before(action) {
            messages += 1;
            if places.get(&receive).is_none_or(|at| *at > place) {
                return refuse(format!(
                    "rank {rank} runs {action} without {receive} before it"
                ));
            }
        }
        if let Some(send) = shape.send_after(action) {
            messages += 1;
            if places.get(&send).is_none_or(|at| *at < place) {
                return refuse(format!("rank {rank} runs {action} without {send} after it"));
            }
        }
    }
    let transfers = list.iter().filter(|a| !a.kind.computes()).count();
    match transfers == messages {
        true => Ok(()),
        false => refuse(format!(
            "rank {rank} sends or receives what nobody computes"
        )),
    }
}

/// Runs the lists with sends that wait for their receives.
fn run_blocking(shape: &PipelineShape, actions: &[Vec<Action>]) -> Result<()> {
    let mut next = vec![0usize; shape.ranks];
    loop {
        let mut moved = false;
        for rank in 0..shape.ranks {
            while let Some(action) = actions[rank].get(next[rank]) {
                let Some(other) = shape.counterpart(action) else {
                    next[rank] += 1;
                    moved = true;
                    continue;
                };
                let peer = shape.rank_of(other.stage);
                if actions[peer].get(next[peer]) != Some(&other) {
                    break;
                }
                next[rank] += 1;
                next[peer] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck: Vec<String> = (0..shape.ranks)
        .filter_map(|rank| Some((rank, actions[rank].get(next[rank])?)))
        .map(|(rank, action)| {
            let peer = shape.peer(action).unwrap_or(rank);
            format!("rank {rank} waits in {action} for rank {peer}")
        })
        .collect();
    match stuck.is_empty() {
        true => Ok(()),
        false => refuse(format!("the pipeline deadlocks: {}", stuck.join(", "))),
    }
}

fn refuse(rule: String) -> Result<()> {
    Err(Error::config(vec![Violation {
        rule,
        nearest: Vec::new(),
    }]))
}
