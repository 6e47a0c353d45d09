//! What a run says before its first step.

use super::memory;
use super::pipeline;
use super::plan::Plan;
use crate::data::RunData;
use crate::say::say;
use crate::units::grouped;
use burn_megatron::optim::{LrDecayStyle, MixedPrecisionConfig};
use burn_megatron::{Precision, RankDevice};

/// Prints the resolved configuration, compactly; the whole of it stands in the run's config.toml.
pub fn print(plan: &Plan) {
    for (name, value) in lines(plan) {
        say!("{name:<9} {value}");
    }
    say!("");
}

fn lines(plan: &Plan) -> Vec<(&'static str, String)> {
    let config = &plan.config;
    let (training, optimizer) = (&config.training, &config.optimizer);
    let layout = plan.resolved.layout();
    let tokens = training.global_batch_size * training.seq_length;
    let mut lines = vec![
        ("model", model(plan)),
        (
            "grid",
            format!("{layout}, ranks are threads, {}", device(training.device)),
        ),
        (
            "batch",
            format!(
                "{} samples of {} tokens = {} tokens per step, micro batch {}",
                training.global_batch_size,
                training.seq_length,
                grouped(tokens as u64),
                training.micro_batch_size
            ),
        ),
        (
            "schedule",
            format!(
                "{} steps, lr {:.1e} to {:.1e} {}, {} warm-up, clip {}, weight decay {}",
                grouped(training.train_iters as u64),
                optimizer.lr,
                optimizer.min_lr,
                style(optimizer.lr_decay_style),
                optimizer.lr_warmup_iters,
                optimizer.clip_grad,
                optimizer.weight_decay
            ),
        ),
        ("data", data(plan)),
    ];
    let fused = plan.resolved.fused_operations();
    let kernels = match fused.is_empty() {
        true => "none fused: primitives of Burn's backend".into(),
        false => format!("fused: {}", fused.join(", ")),
    };
    lines.insert(2, ("kernels", kernels));
    if let Some(numbers) = numbers(&config.mixed_precision) {
        lines.insert(1, ("numbers", numbers));
    }
    if let Some(pipeline) = pipeline::planned(plan) {
        let grid = lines.iter().position(|(name, _)| *name == "grid");
        lines.insert(grid.map_or(0, |at| at + 1), ("pipeline", pipeline));
    }
    let start = match (&plan.load, &training.init_weights) {
        (Some(checkpoint), _) => format!(
            "of {}, step {}{}",
            checkpoint.path().display(),
            checkpoint.manifest().progress.iteration,
            match (config.checkpoint.finetune, config.checkpoint.no_load_optim) {
                (true, _) => ", from step 1",
                (_, true) => ", with a new optimizer",
                _ => "",
            }
        ),
        (None, Some(path)) => format!("from {}", path.display()),
        (None, None) => format!("random, seed {}", training.seed),
    };
    lines.push(("weights", start));
    lines.push(("memory", memory::planned(plan)));
    lines.push(("run dir", plan.run_dir.display().to_string()));
    lines
}

fn device(device: RankDevice) -> &'static str {
    match device {
        RankDevice::Cpu => "Flex CPU backend",
        RankDevice::Cuda => "an NVIDIA card each",
        RankDevice::Wgpu => "one card through wgpu",
    }
}

/// What is not in f32.
fn numbers(mixed: &MixedPrecisionConfig) -> Option<String> {
    let scale = match (mixed.fp16, mixed.loss_scale) {
        (false, _) => String::new(),
        (true, Some(scale)) => format!(", loss scale {scale}"),
        (true, None) => format!(", loss scale {} at first", mixed.initial_loss_scale),
    };
    let name = mixed.precision().name();
    let rest = "master weights, gradient sums and optimizer fp32";
    (mixed.precision() != Precision::Fp32)
        .then(|| format!("weights and activations {name}{scale}; {rest}"))
}

/// The style's name as the flags spell it.
fn style(style: LrDecayStyle) -> String {
    let name = serde_json::to_value(style).ok();
    let name = name.as_ref().and_then(|name| name.as_str());
    name.unwrap_or_default().into()
}

fn model(plan: &Plan) -> String {
    let (model, resolved) = (&plan.config.model, &plan.resolved);
    let pp = resolved.layout().grid.sizes().pp;
    let per_rank = (0..pp).map(|rank| resolved.parameters_per_rank(rank)).max();
    let (total, per_rank) = (resolved.num_parameters(), per_rank.unwrap_or_default());
    format!(
        "GPT, {} layers, hidden {}, {} heads, vocabulary {} (padded to {}): {} parameters, {} {}",
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        grouped(resolved.config().vocab_size as u64),
        grouped(resolved.layout().padded_vocab_size as u64),
        grouped(total as u64),
        grouped(per_rank as u64),
        match pp {
            1 => "per rank",
            _ => "on the largest rank",
        }
    )
}

fn data(plan: &Plan) -> String {
    let data = &plan.config.data;
    match &plan.data {
        RunData::Batches(batches) => {
            let masked = if data.token_batches_loss_mask {
                ", masked"
            } else {
                ""
            };
            let path = batches.path().display();
            format!("{path}: {} steps of token batches{masked}", batches.steps())
        }
        RunData::Corpus(corpus) => format!(
            "{}: {} tokens, split {}",
            data.data_path.join(" "),
            grouped(corpus.tokens()),
            data.split
        ),
    }
}
