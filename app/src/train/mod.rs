//! `megatron train`: from the command line to a trained model.
//!
//! Everything that can be wrong is found by [`Plan::prepare`], on the main thread. Then burn-train
//! is given a strategy ([`strategy`]) that runs one thread per rank ([`rank`]); rank 0 reports to
//! burn-train's event processor ([`feed`]), which keeps the metrics ([`metrics`]) and draws them
//! ([`lines`], or burn-train's dashboard).

mod banner;
mod feed;
mod interrupt;
mod lines;
mod memory;
mod metrics;
mod pipeline;
mod plan;
mod rank;
mod report;
mod saving;
mod strategy;
mod terminal;

pub use plan::Plan;
pub use rank::intervals;

use saving::Stop;

use crate::cli::TrainArgs;
use crate::config::RunConfig;
use crate::error::{Failure, INTERRUPTED, Result};
use std::process::ExitCode;
use std::time::Instant;

/// Runs `megatron train`.
pub fn run(args: &TrainArgs) -> Result<ExitCode> {
    let started = Instant::now();
    let config = RunConfig::load(args)?;
    let name = args.config.as_deref().and_then(|path| path.file_stem());
    let name = name.map_or("train".into(), |stem| stem.to_string_lossy());
    let plan = Plan::prepare(config, &name)?;
    banner::print(&plan);
    let ended = strategy::launch(&plan)?;
    if let Some(path) = &plan.config.logging.trace {
        pipeline::write_trace(&plan, &ended, path)?;
    }
    report::print(&plan, &ended, started.elapsed())?;
    if let Some(reason) = ended.save_failed {
        return Err(Failure::run(
            reason,
            "the checkpoints before it are as they were; free or name another directory, and resume",
        ));
    }
    let clean_exit = plan.config.checkpoint.exit_signal_handler;
    Ok(match ended.stop {
        Some(Stop::Asked) if !clean_exit => ExitCode::from(INTERRUPTED),
        _ => ExitCode::SUCCESS,
    })
}
