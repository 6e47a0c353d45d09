//! `megatron`: trains large transformers with Megatron-LM's parallelism, on Burn.

mod checkpoint;
mod cli;
mod config;
mod data;
mod error;
mod preprocess;
mod say;
mod schedule;
mod train;
mod units;

use burn_megatron::memory::CountingAllocator;
use clap::Parser;
use std::process::ExitCode;

/// Counts what each rank allocates, for the memory report.
#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    burn_megatron::keep_freed_memory();
    let done = match cli::Cli::parse().command {
        cli::Command::Train(args) => train::run(&args),
        cli::Command::Preprocess(args) => preprocess::run(&args),
        cli::Command::Checkpoint(args) => checkpoint::run(&args).map(|()| ExitCode::SUCCESS),
        cli::Command::Schedule(args) => schedule::run(&args).map(|()| ExitCode::SUCCESS),
    };
    match done {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}
