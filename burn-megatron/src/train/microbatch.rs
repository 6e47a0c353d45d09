//! The tokens of a step on their way into the model, and the loss on its way out.

use super::BatchConfig;
use crate::comm::{CommRef, Communicator, all_gather_values};
use crate::error::{ErrorKind, Result};
use burn::tensor::{Device, Int, Tensor, TensorData};
use std::borrow::Cow;

/// Tokens of one microbatch of one data-parallel rank.
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatch {
    /// `[micro batch, seq + 1]`, row by row: a sample's inputs are its first `seq`, its labels its
    /// last `seq`.
    pub tokens: Vec<i64>,
    /// `[micro batch, seq]`: which labels count; all where absent.
    pub loss_mask: Option<Vec<f32>>,
}

/// A loss over many tokens: kept as a sum, so that it can be averaged once.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LossSum {
    pub sum: f64,
    pub tokens: f64,
}

impl LossSum {
    /// Loss per token; 0 where no token counts.
    pub fn mean(&self) -> f32 {
        match self.tokens > 0.0 {
            true => (self.sum / self.tokens) as f32,
            false => 0.0,
        }
    }

    pub(super) fn add(&mut self, other: LossSum) {
        self.sum += other.sum;
        self.tokens += other.tokens;
    }

    /// The sum over a group, added up in rank order.
    pub(super) fn all_reduce(self, comm: &CommRef) -> Result<LossSum> {
        let mut total = LossSum::default();
        for [sum, tokens] in all_gather_values(&**comm, [self.sum, self.tokens])? {
            total.add(LossSum { sum, tokens });
        }
        Ok(total)
    }
}

/// What every microbatch of a run must look like.
#[derive(Debug, Clone, Copy)]
pub(super) struct MicroBatchShape {
    /// Samples (`b`).
    pub samples: usize,
    /// Tokens of a sample (`s`).
    pub seq: usize,
    /// Positions of the activations that a rank exchanges with other stages: `s`, or `s/t`.
    pub hidden_seq: usize,
    pub vocab_size: usize,
}

impl MicroBatchShape {
    /// Over `sequence_parts` ranks, 1 without sequence parallelism.
    pub fn new(batch: &BatchConfig, sequence_parts: usize, vocab_size: usize) -> Self {
        MicroBatchShape {
            samples: batch.micro_batch_size,
            seq: batch.seq_length,
            hidden_seq: batch.seq_length / sequence_parts,
            vocab_size,
        }
    }

    fn tokens(&self) -> usize {
        self.samples * (self.seq + 1)
    }

    /// The inputs, `[b, s]`.
    pub fn inputs(&self, microbatch: &MicroBatch, device: &Device) -> Tensor<2, Int> {
        self.rows(microbatch, 0, device)
    }

    /// The labels, `[b, s]`.
    pub fn labels(&self, microbatch: &MicroBatch, device: &Device) -> Tensor<2, Int> {
        self.rows(microbatch, 1, device)
    }

    fn rows(&self, microbatch: &MicroBatch, skip: usize, device: &Device) -> Tensor<2, Int> {
        let rows = microbatch
            .tokens
            .chunks(self.seq + 1)
            .flat_map(|row| &row[skip..skip + self.seq]);
        let rows: Vec<i64> = rows.copied().collect();
        Tensor::from_data(TensorData::new(rows, [self.samples, self.seq]), device)
    }

    /// How many tokens count, by the mask.
    pub fn tokens_that_count(&self, microbatch: &MicroBatch) -> f64 {
        match &microbatch.loss_mask {
            None => (self.samples * self.seq) as f64,
            Some(mask) => mask.iter().map(|m| f64::from(*m)).sum(),
        }
    }

    /// What each token's loss `[b, s]` is multiplied by: `weight`, and the mask.
    pub fn weights(&self, microbatch: &MicroBatch, weight: f64) -> Vec<f32> {
        let weight = weight as f32;
        match &microbatch.loss_mask {
            None => vec![weight; self.samples * self.seq],
            Some(mask) => mask.iter().map(|m| weight * m).collect(),
        }
    }

    /// The sum of the losses `[b, s]` that count.
    pub fn sum(&self, losses: Tensor<2>, microbatch: &MicroBatch) -> f64 {
        let losses = losses.into_data();
        let losses = losses.iter::<f32>().map(f64::from);
        match &microbatch.loss_mask {
            None => losses.sum(),
            Some(mask) => losses.zip(mask).map(|(l, m)| l * f64::from(*m)).sum(),
        }
    }

    /// Checks the microbatches that world rank `rank` brings.
    ///
    /// # Errors
    /// If there are not `count`, or one is misshapen or has a token outside of the vocabulary.
    pub fn check(&self, microbatches: &[MicroBatch], count: usize, rank: usize) -> Result<()> {
        let reason = match microbatches.len() == count {
            true => microbatches.iter().find_map(|mb| self.fault(mb)),
            false => Some(format!(
                "got {} microbatches for a step, not {count}",
                microbatches.len()
            )),
        };
        match reason {
            Some(reason) => Err(ErrorKind::Rank { rank, reason }.into()),
            None => Ok(()),
        }
    }

    fn fault(&self, microbatch: &MicroBatch) -> Option<String> {
        let (b, s) = (self.samples, self.seq);
        let len = microbatch.tokens.len();
        if len != self.tokens() {
            return Some(format!(
                "got a microbatch of {len} tokens, not {b} x ({s} + 1) = {}",
                self.tokens()
            ));
        }
        let mask = microbatch.loss_mask.as_ref();
        if let Some(mask) = mask.filter(|mask| mask.len() != b * s) {
            let len = mask.len();
            return Some(format!("got a loss mask of {len} values, not {b} x {s}"));
        }
        let vocabulary = 0..self.vocab_size as i64;
        let mut tokens = microbatch.tokens.iter();
        let at = tokens.position(|token| !vocabulary.contains(token))?;
        Some(format!(
            "got token {} at position {} of sample {} of a microbatch, but the vocabulary has {} \
             entries; the data was made with another tokenizer",
            microbatch.tokens[at],
            at % (s + 1),
            at / (s + 1),
            self.vocab_size
        ))
    }

    /// Gives rank 0's checked microbatches of a step to the whole tensor-parallel group.
    pub fn broadcast<'a>(
        &self,
        microbatches: &'a [MicroBatch],
        count: usize,
        tp: &dyn Communicator,
    ) -> Result<Cow<'a, [MicroBatch]>> {
        if tp.size() == 1 {
            return Ok(Cow::Borrowed(microbatches));
        }
        let reads = tp.rank() == 0;
        // The tokens of all microbatches, and then for each whether it has a mask.
        let mut tokens = vec![0i64; count * (self.tokens() + 1)];
        let (_, flags) = tokens.split_at_mut(count * self.tokens());
        if reads {
            for (flag, microbatch) in flags.iter_mut().zip(microbatches) {
                *flag = i64::from(microbatch.loss_mask.is_some());
            }
            for (place, microbatch) in tokens.chunks_mut(self.tokens()).zip(microbatches) {
                place.copy_from_slice(&microbatch.tokens);
            }
        }
        tp.broadcast(bytemuck::cast_slice_mut(&mut tokens), 0)?;
        let (tokens, flags) = tokens.split_at(count * self.tokens());
        let shared = tokens.chunks(self.tokens()).zip(flags).enumerate();
        shared
            .map(|(i, (tokens, masked))| {
                let mut loss_mask = (*masked != 0).then(|| {
                    let mine = microbatches.get(i).filter(|_| reads);
                    let mine = mine.and_then(|mb| mb.loss_mask.clone());
                    mine.unwrap_or_else(|| vec![0f32; self.samples * self.seq])
                });
                if let Some(mask) = &mut loss_mask {
                    tp.broadcast(bytemuck::cast_slice_mut(mask), 0)?;
                }
                Ok(MicroBatch {
                    tokens: tokens.to_vec(),
                    loss_mask,
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::threads::ThreadWorld;
    use std::time::Duration;

    #[test]
    fn the_group_gets_rank_0s_microbatches_masks_and_all() {
        let shape = MicroBatchShape {
            samples: 2,
            seq: 3,
            hidden_seq: 3,
            vocab_size: 100,
        };
        let microbatch = |i: i64, loss_mask| MicroBatch {
            tokens: (i..i + 8).collect(),
            loss_mask,
        };
        let read = [
            microbatch(0, None),
            microbatch(10, Some(vec![1.0, 0.0, 1.0, 1.0, 0.5, 0.0])),
            microbatch(20, None),
        ];
        shape.check(&read, 3, 0).unwrap();
        let ends = ThreadWorld::new(Duration::from_secs(30)).group("tp", &[0, 1]);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| shape.broadcast(&[], 3, &ends[1]));
            assert_eq!(shape.broadcast(&read, 3, &ends[0]).unwrap()[..], read[..]);
            assert_eq!(other.join().unwrap().unwrap()[..], read[..]);
        });
    }

    #[test]
    fn microbatches_that_are_not_the_runs_are_named() {
        let shape = MicroBatchShape {
            samples: 1,
            seq: 2,
            hidden_seq: 2,
            vocab_size: 10,
        };
        let microbatch = |tokens: &[i64], mask: Option<usize>| MicroBatch {
            tokens: tokens.to_vec(),
            loss_mask: mask.map(|len| vec![1.0; len]),
        };
        for (microbatches, words) in [
            (vec![], "rank 3 got 0 microbatches for a step, not 1"),
            (
                vec![microbatch(&[1, 2], None)],
                "2 tokens, not 1 x (2 + 1) = 3",
            ),
            (
                vec![microbatch(&[1, 2, 3], Some(3))],
                "a loss mask of 3 values, not 1 x 2",
            ),
            (
                vec![microbatch(&[1, 10, 3], None)],
                "token 10 at position 1 of sample 0",
            ),
        ] {
            let error = shape.check(&microbatches, 1, 3).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
