//! A trainer's state, to a checkpoint and back.

use super::Trainer;
use crate::checkpoint::{Checkpoint, Kind, Progress, SavedLayout, Snapshot, SnapshotPart};
use crate::error::{ErrorKind, Result};
use crate::grads::OwnedPart;
use crate::models::Stage;
use crate::optim::LossScaler;
use crate::shard::{FlatBuffer, ParamRecord};
use serde_json::Value;
use std::ops::Range;

/// What is taken from a checkpoint beside the weights, under the names of Megatron's flags.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Leave the optimizer's state as it is: moments of zero.
    pub no_load_optim: bool,
    /// Leave the counters as well: the training starts at iteration 0.
    pub finetune: bool,
}

impl<M: Stage> Trainer<M> {
    /// How far the training is.
    pub fn progress(&self) -> Progress {
        Progress {
            iteration: self.iteration as u64,
            consumed_samples: self.consumed_samples,
            skipped_iterations: self.skipped_iterations,
            skipped_samples: self.skipped_samples,
            loss_scale: self.loss_scaler.as_ref().map(LossScaler::now),
            optimizer_steps: u64::from(self.optimizer.steps()),
            seed: self.config.seed,
        }
    }

    /// This rank's part of a checkpoint. `run` is kept with it, for whoever loads it.
    pub fn snapshot(&self, run: Value) -> Snapshot<'_> {
        let groups = &self.context.groups;
        let (params, owned) = (self.model.params(), self.data_parallel.owned());
        let distributed = self.config.data_parallel.use_distributed_optimizer;
        // One copy of everything: what several ranks hold alike, the first of them writes.
        let writes = distributed || groups.dp.comm.rank() == 0;
        let mine = owned.parts().iter().filter(|part| {
            let param = &params[part.param];
            writes && param.counts_at(groups)
        });
        let weights = std::iter::once((Kind::Weight, self.values.host()));
        let values = weights.chain(self.optimizer.state());
        Snapshot {
            progress: self.progress(),
            layout: SavedLayout {
                tensor_model_parallel_size: groups.tp.comm.size(),
                pipeline_model_parallel_size: groups.pp.comm.size(),
                virtual_stages: self.model.chunks().len(),
                data_parallel_size: groups.dp.comm.size(),
                use_distributed_optimizer: distributed,
            },
            run,
            values: values.collect(),
            parts: mine
                .map(|part| SnapshotPart {
                    name: params[part.param].name.clone(),
                    spec: params[part.param].spec.clone(),
                    within: within(part, &params[part.param]),
                    packed: part.packed.clone(),
                })
                .collect(),
        }
    }

    /// Takes weights, optimizer state and counters from a checkpoint, whichever layout saved it. Each rank
    /// reads what it owns. Every rank calls it.
    ///
    /// # Errors
    /// If a tensor is missing, misshapen, not of this model (all are listed) or damaged; the trainer is not
    /// to be used then. Or if another rank fails.
    pub fn load(&mut self, checkpoint: &Checkpoint, options: LoadOptions) -> Result<()> {
        let names = self.model.names_of_all_stages()?;
        let problems = checkpoint.misfits(self.model.params(), &names);
        if !problems.is_empty() {
            let path = checkpoint.path().to_path_buf();
            return Err(ErrorKind::Weights { path, problems }.into());
        }
        self.take_values();
        let mut values = std::mem::take(&mut self.values);
        let (params, owned) = (self.model.params(), self.data_parallel.owned());
        let read = |kind, buffer: &mut FlatBuffer| -> Result<()> {
            buffer.change(0..owned.len(), |packed| {
                owned.parts().iter().try_for_each(|part| {
                    let param = &params[part.param];
                    let out = &mut packed[part.packed.clone()];
                    checkpoint.read(kind, &param.name, &param.spec, &within(part, param), out)
                })
            })
        };
        read(Kind::Weight, &mut values)?;
        self.values = values;
        let Progress {
            iteration,
            consumed_samples,
            skipped_iterations,
            skipped_samples,
            optimizer_steps,
            loss_scale,
            ..
        } = checkpoint.manifest().progress;
        if !options.no_load_optim && !options.finetune {
            for (kind, buffer) in self.optimizer.restore(optimizer_steps as u32) {
                read(kind, buffer)?;
            }
            if let (Some(scaler), Some(saved)) = (&mut self.loss_scaler, loss_scale) {
                scaler.restore(saved);
            }
        }
        if !options.finetune {
            self.iteration = iteration as usize;
            self.consumed_samples = consumed_samples;
            self.skipped_iterations = skipped_iterations;
            self.skipped_samples = skipped_samples;
        }
        self.publish_values(None)
    }
}

/// The part's elements among those of the rank's part of the parameter.
fn within(part: &OwnedPart, param: &ParamRecord) -> Range<usize> {
    part.flat.start - param.range.start..part.flat.end - param.range.start
}
