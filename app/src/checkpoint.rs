//! `megatron checkpoint`: what is in a checkpoint, whether it is whole, and the same in other pieces.

use crate::cli::{CheckpointAction, CheckpointArgs, CheckpointPath, ReshardArgs};
use crate::config::RunConfig;
use crate::error::{Failure, Result};
use crate::say::say;
use crate::units::{bytes, grouped};
use burn_megatron::checkpoint::{Checkpoint, Kind, SaveTo, SavedTensor, Saver};
use burn_megatron::grads::DataParallelConfig;
use burn_megatron::launch::{DEFAULT_TIMEOUT, run_ranks};
use burn_megatron::train::{LoadOptions, ResolvedConfig, Trainer};

/// Runs `megatron checkpoint`.
pub fn run(args: &CheckpointArgs) -> Result<()> {
    match &args.action {
        CheckpointAction::Inspect(path) => {
            inspect(&find(path)?);
            Ok(())
        }
        CheckpointAction::Verify(path) => verify(&find(path)?),
        CheckpointAction::Reshard(args) => reshard(args),
    }
}

fn find(path: &CheckpointPath) -> Result<Checkpoint> {
    Ok(Checkpoint::find(&path.dir, path.ckpt_step)?)
}

fn inspect(checkpoint: &Checkpoint) {
    let manifest = checkpoint.manifest();
    let (progress, layout) = (manifest.progress, manifest.layout);
    say!("{}", checkpoint.path().display());
    say!(
        "  step      {}, {} samples, {} updates of the optimizer, seed {}",
        grouped(progress.iteration),
        grouped(progress.consumed_samples),
        grouped(progress.optimizer_steps),
        progress.seed
    );
    say!(
        "  saved by  tp={} pp={} v={} dp={}{}; any layout loads it",
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.virtual_stages,
        layout.data_parallel_size,
        match layout.use_distributed_optimizer {
            true => ", distributed optimizer",
            false => "",
        }
    );
    say!(
        "  files     {}, {}",
        manifest.files.len(),
        bytes(manifest.bytes())
    );
    let elements = |tensor: &SavedTensor| tensor.shape.iter().product::<usize>() as u64;
    let total: u64 = manifest.tensors.values().map(elements).sum();
    say!(
        "  weights   {} in {} tensors",
        grouped(total),
        manifest.tensors.len()
    );
    say!("");
    let longest = manifest.tensors.keys().map(String::len).max();
    let width = longest.unwrap_or_default();
    say!("{:<width$}  type  shape and pieces", "tensor");
    for (name, tensor) in &manifest.tensors {
        let kinds = tensor.pieces.iter().flat_map(|piece| piece.values.keys());
        let mut kinds: Vec<Kind> = kinds.copied().collect();
        kinds.sort();
        kinds.dedup();
        let kinds: Vec<&str> = kinds.into_iter().map(Kind::name).collect();
        let pieces = match tensor.pieces.len() {
            1 => "1 piece".to_string(),
            n => format!("{n} pieces"),
        };
        say!(
            "{name:<width$}  {:<4}  {:?} in {pieces}: {}",
            tensor.dtype,
            tensor.shape,
            kinds.join(", ")
        );
    }
}

fn verify(checkpoint: &Checkpoint) -> Result<()> {
    let faults = checkpoint.verify();
    let path = checkpoint.path().display();
    if faults.is_empty() {
        let manifest = checkpoint.manifest();
        say!(
            "{path}: {} in {} files, every checksum is right",
            bytes(manifest.bytes()),
            manifest.files.len()
        );
        return Ok(());
    }
    let faults: Vec<String> = (faults.iter())
        .map(|fault| {
            let offset = fault.offset.unwrap_or_default();
            format!(
                "\n  - {} at byte {offset}: {}",
                fault.file.display(),
                fault.reason
            )
        })
        .collect();
    Err(Failure::run(
        format!("{path} is damaged:{}", faults.concat()),
        "load an older checkpoint (--ckpt-step), or copy this one again from where it is whole",
    ))
}

/// Loads the checkpoint under the new layout and saves it: the same way as a run would.
fn reshard(args: &ReshardArgs) -> Result<()> {
    let checkpoint = find(&args.from)?;
    let resolved = resharded(&checkpoint, args)?;
    let run = checkpoint.manifest().run.clone();
    let saved = run_ranks(&resolved.layout().grid, DEFAULT_TIMEOUT, |rank| {
        let mut trainer = Trainer::new(&resolved, rank, None)?;
        trainer.load(&checkpoint, LoadOptions::default())?;
        let to = SaveTo {
            dir: args.output.clone(),
            ..SaveTo::default()
        };
        let mut saver = Saver::new(to, rank.groups.saver.comm.clone());
        saver.save(&trainer.snapshot(run.clone()))
    })?;
    if let Some(saved) = saved.first() {
        let layout = resolved.layout();
        say!(
            "{} as {layout} is {} ({})",
            checkpoint.path().display(),
            saved.path.display(),
            bytes(saved.bytes)
        );
    }
    Ok(())
}

/// The run's configuration under the new layout, with a batch that suits it: nothing is trained.
fn resharded(checkpoint: &Checkpoint, args: &ReshardArgs) -> Result<ResolvedConfig> {
    let run = &checkpoint.manifest().run;
    let unknown = || {
        Failure::run(
            format!(
                "{} does not say of which model it is",
                checkpoint.path().display()
            ),
            "load it with the program that saved it",
        )
    };
    let config = run.get("config").ok_or_else(unknown)?;
    let mut config: RunConfig = serde_json::from_value(config.clone()).map_err(|_| unknown())?;
    let vocab_size = run.get("vocab_size").and_then(|size| size.as_u64());
    let vocab_size = vocab_size.ok_or_else(unknown)? as usize;
    let dp = args.data_parallel_size;
    let (tp, pp) = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
    );
    config.parallel = burn_megatron::topology::ParallelConfig {
        tensor_model_parallel_size: tp,
        pipeline_model_parallel_size: pp,
        world_size: Some(tp * pp * dp),
        ..Default::default()
    };
    config.data_parallel = DataParallelConfig {
        use_distributed_optimizer: dp > 1,
        ..DataParallelConfig::default()
    };
    config.training.micro_batch_size = 1;
    config.training.global_batch_size = dp;
    Ok(config.train_config(vocab_size).resolve()?)
}
