//! The optimizer over flat buffers, and the learning-rate schedule.

mod adamw;
mod config;
mod schedule;

pub use adamw::{AdamW, AdamWConfig};
pub use config::OptimizerConfig;
pub use schedule::{LrDecayStyle, LrSchedule, LrScheduleConfig};
