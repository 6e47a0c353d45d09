//! Puts sends and receives between what the ranks compute.
//!
//! The ranks' orders are played once, a forward taking one unit of time and a backward two. That
//! puts all computations in one order in time, and each message at the moment it is made. Every
//! rank's list is its part of that one order, a message's send and receive at the same place in it:
//! so each send meets its receive in order, and no set of ranks can wait in a circle, even where a
//! send waits for its receive.

use super::{Action, Kind};
use crate::error::Result;
use crate::pipeline::simulate::{self, Durations};
use crate::topology::PipelineShape;

/// The ranks' lists with sends and receives.
///
/// # Errors
/// If some rank would wait for ever for what it starts from.
pub(super) fn with_transfers(
    shape: &PipelineShape,
    orders: &[Vec<Action>],
) -> Result<Vec<Vec<Action>>> {
    let durations = Durations::equal(shape.num_stages(), 1.0, 2.0, 0.0);
    let played = simulate::play(shape, orders, &durations)?;
    // (time, transfers before computations of the same time, ..)
    let mut moments: Vec<(f64, bool, Action)> = Vec::new();
    for span in played.iter().flatten() {
        moments.push((span.start, true, span.action));
        if let Some(send) = shape.send_after(&span.action) {
            moments.push((span.end, false, send));
        }
    }
    moments.sort_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));

    let mut lists = vec![Vec::new(); shape.ranks];
    for (_, _, action) in moments {
        lists[shape.rank_of(action.stage)].push(action);
        if let Some(receive) = shape.counterpart(&action) {
            debug_assert!(matches!(
                receive.kind,
                Kind::ReceiveForward | Kind::ReceiveBackward
            ));
            lists[shape.rank_of(receive.stage)].push(receive);
        }
    }
    Ok(lists)
}
