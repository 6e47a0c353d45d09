//! Pipeline parallelism: schedules as data, and what checks, times and runs them.
//!
//! [`README.md`](https://docs.rs/crate/burn-megatron/latest/source/src/pipeline/README.md) walks one
//! example through.

pub mod executor;
pub mod schedule;
pub mod simulate;
pub mod timeline;

pub use executor::{Work, execute};
pub use schedule::{Action, Kind, Schedule};
pub use simulate::{Durations, simulate};
pub use timeline::{Span, Timeline};
