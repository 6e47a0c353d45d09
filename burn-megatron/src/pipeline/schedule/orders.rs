//! What each rank computes, in order: Megatron-LM's `core/pipeline_parallel/schedules.py`.

use super::{Action, Kind};
use crate::topology::PipelineShape;

/// Every forward, then every backward.
pub(super) fn gpipe(shape: &PipelineShape, rank: usize) -> Vec<Action> {
    warmed_up(shape.microbatches, shape.microbatches, |kind, k| {
        Action::new(rank, kind, k)
    })
}

/// As many forwards first as there are ranks behind, then one backward after each forward.
pub(super) fn one_f_one_b(shape: &PipelineShape, rank: usize) -> Vec<Action> {
    warmed_up(shape.microbatches, shape.ranks - rank - 1, |kind, k| {
        Action::new(rank, kind, k)
    })
}

/// 1F1B over `v` chunks: a group of micro batches runs through one chunk, then through the next;
/// backwards go through the chunks from the last.
pub(super) fn interleaved(shape: &PipelineShape, rank: usize) -> Vec<Action> {
    let (p, v, group) = (shape.ranks, shape.virtual_stages, shape.group_size());
    let mut turns = Vec::with_capacity(shape.microbatches * v);
    for start in (0..shape.microbatches).step_by(group) {
        let end = shape.microbatches.min(start + group);
        turns.extend((0..v).flat_map(|chunk| (start..end).map(move |mb| (mb, chunk))));
    }
    let warmup = 2 * (p - rank - 1) + (v - 1) * group;
    warmed_up(turns.len(), warmup, |kind, k| {
        let (microbatch, turn) = turns[k];
        let chunk = match kind {
            Kind::Forward => turn,
            _ => v - 1 - turn,
        };
        Action::new(chunk * p + rank, kind, microbatch)
    })
}

/// `warmup` forwards, then forwards and backwards in turn, then the backwards that are left; the
/// `k`-th forward is `action(Forward, k)`, the `k`-th backward likewise.
fn warmed_up(total: usize, warmup: usize, action: impl Fn(Kind, usize) -> Action) -> Vec<Action> {
    let warmup = warmup.min(total);
    let mut order = Vec::with_capacity(2 * total);
    order.extend((0..warmup).map(|k| action(Kind::Forward, k)));
    for k in 0..total - warmup {
        order.push(action(Kind::Forward, warmup + k));
        order.push(action(Kind::Backward, k));
    }
    order.extend((total - warmup..total).map(|k| action(Kind::Backward, k)));
    order
}
