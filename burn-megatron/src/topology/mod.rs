//! Who does what: the rank grid and its groups, and the rules a layout must keep.
//!
//! Plain arithmetic: nothing here communicates or computes on a device.

mod axis;
mod grid;
pub(crate) mod nearest;
mod parallel;
mod schedule;
mod stages;
mod validate;
mod vocab;

pub use axis::{Axes, Axis};
pub use grid::{DEFAULT_ORDER, RankGrid};
pub use parallel::{BatchShape, Layout, ModelShape, ParallelConfig};
pub use schedule::{PipelineSchedule, PipelineShape, schedule_violations};
pub use stages::StageLayers;
pub(crate) use validate::batch_violation;
pub use validate::{unsupported, validate};
pub use vocab::{padded_vocab_size, shard_range};
