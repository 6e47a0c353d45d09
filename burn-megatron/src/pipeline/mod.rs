#![doc = include_str!("README.md")]

pub mod executor;
pub mod schedule;
pub mod simulate;
pub mod timeline;

pub use executor::{Work, execute};
pub use schedule::{Action, Kind, Schedule};
pub use simulate::{Durations, simulate};
pub use timeline::{Span, Timeline};
