//! The optimizer over flat buffers, and the schedules of learning rate and weight decay.

mod config;
mod optimizer;
mod schedule;
mod weight_decay;

pub use config::{OptimizerConfig, OptimizerKind};
pub use optimizer::{AdamWConfig, Optimizer, Rule, SgdConfig};
pub use schedule::{LrDecayStyle, LrSchedule, LrScheduleConfig, Warmup, WsdDecayStyle};
pub use weight_decay::{WeightDecayIncrStyle, WeightDecaySchedule};
