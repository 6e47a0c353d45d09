//! `megatron preprocess`: JSON lines to token files, with a progress bar.

use crate::cli::PreprocessArgs;
use crate::data::build_tokenizer;
use crate::error::{Failure, Result};
use crate::say::say;
use crate::units::{duration, grouped};
use burn_megatron::data::{PreprocessConfig, Progress, Report, preprocess};
use indicatif::{ProgressBar, ProgressStyle};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Runs `megatron preprocess`.
pub fn run(args: &PreprocessArgs) -> Result<ExitCode> {
    let started = Instant::now();
    let tokenizer = build_tokenizer(&args.tokenizer())?;
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let config = PreprocessConfig {
        input: args.input.clone(),
        output_prefix: args.output_prefix.clone(),
        json_keys: args.json_keys.clone(),
        append_eod: args.append_eod,
        workers: args.workers.unwrap_or(cores),
        skip_bad_lines: args.skip_bad_lines,
    };
    let bar = progress_bar();
    let report = preprocess(&config, &tokenizer, &mut |progress: Progress| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.bytes);
        bar.set_message(speed(&progress, started.elapsed()));
    });
    bar.finish_and_clear();
    let report = report.map_err(|error| {
        let next = "correct that line, or leave such lines out with --skip-bad-lines";
        Failure::bad_line(error, next)
    })?;
    say!("{}", totals(&config, &report));
    Ok(ExitCode::SUCCESS)
}

/// A bar over the input's bytes; indicatif hides it where stderr is no terminal.
fn progress_bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    let template = "{bar:30} {percent:>3}% {msg} | ETA {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

fn speed(progress: &Progress, elapsed: Duration) -> String {
    let per_second = |n: u64| grouped((n as f64 / elapsed.as_secs_f64()) as u64);
    format!(
        "{} documents/s | {} tokens/s",
        per_second(progress.documents),
        per_second(progress.tokens)
    )
}

fn totals(config: &PreprocessConfig, report: &Report) -> String {
    let skipped = match report.skipped_lines {
        0 => String::new(),
        1 => ", 1 bad line skipped".into(),
        n => format!(", {} bad lines skipped", grouped(n)),
    };
    let files = config.json_keys.iter().map(|key| config.output(key));
    let files: Vec<String> = files
        .map(|prefix| format!("{}.{{bin,idx}}", prefix.display()))
        .collect();
    format!(
        "{} documents, {} tokens{skipped} in {} ({} tokens/s): {}",
        grouped(report.documents),
        grouped(report.tokens),
        duration(Duration::from_secs_f64(report.seconds)),
        grouped((report.tokens as f64 / report.seconds) as u64),
        files.join(", ")
    )
}
