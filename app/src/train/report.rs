//! What a run says after its last step.

use super::pipeline;
use super::plan::Plan;
use super::rank;
use super::saving::Stop;
use super::strategy::Ended;
use crate::error::Result;
use crate::say::say;
use crate::units::{bytes, duration, grouped};
use std::time::Duration;

/// Prints the sample, the summary and the files.
pub fn print(plan: &Plan, ended: &Ended, wall: Duration) -> Result<()> {
    say!("");
    let history = &ended.history;
    let (Some(first), Some(last)) = (&history.first, &history.last) else {
        say!("no step was taken");
        return Ok(());
    };
    if let (Some(sample), Some(tokens)) = (&plan.sample, &ended.sample) {
        say!("sample after {} steps:", last.iteration);
        let text = sample.text(tokens)?;
        text.lines().for_each(|line| say!("  {line}"));
        say!("");
    }
    let steps = plan.config.training.train_iters;
    let why = ended.stop.map(|stop| match stop {
        Stop::Asked => "by request",
        Stop::Duration => "by --exit-duration-in-mins",
        Stop::Interval => "by --exit-interval",
    });
    match why {
        Some(why) => say!("stopped {why} at iteration {} of {steps}", last.iteration),
        None => say!("trained {steps} steps in {}", duration(wall)),
    }
    say!(
        "  loss      {:.4} at first, {:.4} at last ({:.0}%)",
        first.lm_loss,
        last.lm_loss,
        100.0 * last.lm_loss / first.lm_loss
    );
    if let Some((loss, interval)) = history.best_validation {
        let config = &plan.config;
        let all = rank::intervals(steps, config.data.eval_interval);
        let iteration = all
            .get(interval - 1)
            .map_or(last.iteration, |steps| steps.end);
        say!("  validated {loss:.4} at best, after iteration {iteration}");
    }
    say!(
        "  speed     {} tokens/s, median",
        grouped(median(&history.speeds) as u64)
    );
    for line in communication(plan, ended, last.iteration as u64) {
        say!("  {line}");
    }
    if let Some(line) = pipeline::line(plan, ended) {
        say!("  pipeline  {line}");
    }
    say!("  files     {}", files(plan));
    if let Some(saved) = &ended.saved {
        say!("  saved     {}", saved.path.display());
        let dir = plan.config.checkpoint.save.as_deref();
        let dir = dir.unwrap_or(&saved.path).display();
        let config = plan.run_dir.join("config.toml");
        let more = match ended.stop {
            Some(_) => "",
            None => " --train-iters N",
        };
        say!(
            "  resume    megatron train --config {} --load {dir}{more}",
            config.display()
        );
    }
    Ok(())
}

/// A line per kind of communication: what rank 0 was predicted to move in a step, and did.
fn communication(plan: &Plan, ended: &Ended, steps: u64) -> Vec<String> {
    let predicted = plan.resolved.step_volumes(0);
    (rank::KINDS.iter().zip(ended.communication.0))
        .map(|(kind, spent)| (kind, (kind.predicted)(&predicted), spent))
        .filter(|(_, predicted, _)| predicted.calls > 0)
        .map(|(kind, predicted, spent)| {
            format!(
                "{:<9} {} {} calls a step, {} ({} predicted{}), {:.1} ms with waiting",
                kind.axis,
                spent.calls / steps,
                kind.call.name(),
                bytes(spent.bytes / steps),
                bytes(predicted.bytes),
                match plan.config.training.rampup_batch_size {
                    Some(_) => " of a whole batch",
                    None => "",
                },
                1e3 * spent.time.as_secs_f64() / steps as f64
            )
        })
        .collect()
}

fn files(plan: &Plan) -> String {
    let dir = plan.run_dir.display();
    let mut files = vec![format!(
        "{dir}/ (config.toml, metrics in train/ and valid/)"
    )];
    let config = &plan.config;
    let named = [
        &config.logging.metrics_file,
        &config.logging.trace,
        &config.training.save_weights,
    ];
    files.extend(
        named
            .into_iter()
            .flatten()
            .map(|path| path.display().to_string()),
    );
    files.join(", ")
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
