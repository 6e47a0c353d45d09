//! The optimizer over flat buffers, and the schedules of learning rate and weight decay.

mod config;
mod optimizer;
mod schedule;

pub use config::{OptimizerConfig, OptimizerKind};
pub use optimizer::{AdamWConfig, Optimizer, Rule, SgdConfig};
pub use schedule::{
    LrDecayStyle, LrSchedule, LrScheduleConfig, Warmup, WeightDecayIncrStyle, WeightDecaySchedule,
    WsdDecayStyle,
};
