//! One data-parallel rank's way through a dataset.

use super::BatchSource;
use burn_megatron::data::{
    Prefetch, Sample, Sampler, SamplerConfig, SamplerPosition, TokenDataset,
};
use burn_megatron::train::{BatchSizes, MicroBatch};
use burn_megatron::{Error, Result};
use std::sync::Arc;

/// Reads one data-parallel rank's micro batches, by step.
pub struct Reader {
    dataset: Arc<dyn TokenDataset>,
    share: SamplerConfig,
    sizes: BatchSizes,
    position: SamplerPosition,
}

impl Reader {
    /// A reader of what a data-parallel rank takes of each global batch, after so many samples over all
    /// ranks.
    pub fn new(
        dataset: Arc<dyn TokenDataset>,
        share: SamplerConfig,
        sizes: BatchSizes,
        consumed_samples: u64,
    ) -> Result<Self> {
        // What no step could take is found out now.
        Sampler::new(share, dataset.len() as u64)?;
        Ok(Reader {
            dataset,
            share,
            sizes,
            position: SamplerPosition { consumed_samples },
        })
    }

    /// The batches of `steps` steps, read `ahead` of the training by a thread; 0 reads them when
    /// they are asked for.
    pub fn batches(mut self, steps: u64, ahead: usize) -> Result<Box<dyn BatchSource>> {
        match ahead {
            0 => Ok(Box::new(Direct(self))),
            _ => {
                let produce = move |_| self.read();
                let batches = Prefetch::spawn(0..steps, ahead, produce)?;
                Ok(Box::new(Ahead(batches)))
            }
        }
    }

    /// The next step's.
    fn read(&mut self) -> Result<Vec<MicroBatch>> {
        let position = self.position;
        let share = SamplerConfig {
            global_batch_size: self.sizes.at(position.consumed_samples),
            ..self.share
        };
        let sampler = Sampler::new(share, self.dataset.len() as u64)?;
        self.position = sampler.advance(position);
        (0..sampler.num_microbatches())
            .map(|i| {
                let samples = sampler.samples(position, i)?;
                let samples = samples.map(|sample| self.dataset.sample(sample as usize));
                Ok(micro_batch(samples.collect::<Result<_>>()?))
            })
            .collect()
    }
}

/// Samples side by side; the mask is left out where it masks nothing, as nearly always.
fn micro_batch(samples: Vec<Sample>) -> MicroBatch {
    let mut tokens = Vec::new();
    let mut mask = Vec::new();
    for sample in samples {
        tokens.extend(&sample.tokens);
        // Labels are the tokens one place on, so only the last is new.
        tokens.extend(sample.labels.last());
        mask.extend(&sample.loss_mask);
    }
    let masked = mask.iter().any(|&weight| weight != 1.0);
    MicroBatch {
        tokens,
        loss_mask: masked.then_some(mask),
    }
}

/// Batches read when they are asked for.
struct Direct(Reader);

impl BatchSource for Direct {
    fn next(&mut self) -> Result<Vec<MicroBatch>> {
        self.0.read()
    }
}

/// Batches read ahead, by a thread of their own.
struct Ahead(Prefetch<Vec<MicroBatch>>);

impl BatchSource for Ahead {
    fn next(&mut self) -> Result<Vec<MicroBatch>> {
        let used_up = || Error::data("dataset", None, "every sample of the run was taken");
        self.0.next()?.ok_or_else(used_up)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_that_masks_nothing_is_left_out() {
        let sample = |mask: [f32; 2]| Sample {
            tokens: vec![1, 2],
            labels: vec![2, 3],
            loss_mask: mask.to_vec(),
            position_ids: vec![0, 1],
        };
        let whole = micro_batch(vec![sample([1.0, 1.0]), sample([1.0, 1.0])]);
        assert_eq!(whole.tokens, [1, 2, 3, 1, 2, 3]);
        assert_eq!(whole.loss_mask, None);
        let padded = micro_batch(vec![sample([1.0, 1.0]), sample([1.0, 0.0])]);
        assert_eq!(padded.loss_mask, Some(vec![1.0, 1.0, 1.0, 0.0]));
    }
}
