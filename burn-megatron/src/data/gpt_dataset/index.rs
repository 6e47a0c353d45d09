//! The arithmetic of [`GptDataset`](super::GptDataset): how many epochs, which sequences in which
//! order, where each sample starts. Plain numbers; nothing here reads a token.

use std::ops::Range;

use crate::data::numpy_random::RandomState;

/// A last epoch that gives less than this share of an epoch's samples is shuffled apart, so that
/// its few samples do not spread a partial epoch over the whole run.
const SEPARATE_EPOCH_THRESHOLD: f64 = 0.80;

/// How many epochs and samples a request comes to.
#[derive(Debug, PartialEq)]
pub(super) struct EpochPlan {
    pub seq_length: u64,
    /// 1 where samples carry an extra token, else 0.
    pub extra: u64,
    pub num_epochs: u64,
    pub num_samples: u64,
    /// With a last epoch shuffled apart: the samples before it.
    pub samples_sans_final_epoch: Option<u64>,
}

impl EpochPlan {
    /// Epochs of `tokens_per_epoch` tokens, enough for `requested` samples or just one.
    ///
    /// Megatron counts a partial last sample in f32, which errs above 2^24 tokens; here the count
    /// is exact.
    ///
    /// # Errors
    /// What the tokens are too few for, as the end of "the sequences have ...".
    pub fn new(
        tokens_per_epoch: u64,
        seq_length: u64,
        extra: u64,
        requested: Option<u64>,
        drop_last: bool,
    ) -> Result<Self, String> {
        let needed = if drop_last {
            seq_length + extra
        } else {
            1 + extra
        };
        if tokens_per_epoch < needed {
            return Err(format!(
                "{tokens_per_epoch} tokens, one sample of seq_length {seq_length} needs {needed}"
            ));
        }
        let tokens_requested = requested
            .unwrap_or(0)
            .checked_mul(seq_length)
            .and_then(|tokens| tokens.checked_add(extra + tokens_per_epoch))
            .ok_or("too few tokens for a number of samples past all counting")?
            - tokens_per_epoch;
        let num_epochs = tokens_requested.div_ceil(tokens_per_epoch).max(1);
        let tokens = num_epochs * tokens_per_epoch - extra;
        let num_samples = if drop_last {
            tokens / seq_length
        } else {
            tokens.div_ceil(seq_length)
        };
        let samples_sans_final_epoch =
            (num_epochs > 1).then(|| (tokens - tokens_per_epoch) / seq_length);
        let per_epoch = (tokens_per_epoch - extra) / seq_length;
        let threshold = (SEPARATE_EPOCH_THRESHOLD * per_epoch as f64) as u64;
        Ok(Self {
            seq_length,
            extra,
            num_epochs,
            num_samples,
            samples_sans_final_epoch: samples_sans_final_epoch
                // Without a request there is one epoch, and nothing to separate.
                .filter(|sans| requested.unwrap_or(0).saturating_sub(*sans) < threshold),
        })
    }
}

/// Where a sample starts: a position in `document_index`, and a token of that sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Start {
    pub position: u32,
    pub offset: u32,
}

/// A sample: from where it starts to where the next one does.
pub(super) struct Parts {
    pub first: Start,
    pub last: Start,
}

/// Megatron's three indices.
pub(super) struct Indices {
    /// The sequences of all epochs, in reading order.
    pub document_index: Vec<u32>,
    /// Where each sample starts, and where the last one ends.
    pub sample_index: Vec<Start>,
    /// The order in which samples are given out.
    pub shuffle_index: Vec<u32>,
}

impl Indices {
    /// Shuffles the sequences `range`, cuts the samples, and shuffles those, in this order from one
    /// random state. Linear in samples and sequences.
    ///
    /// # Errors
    /// More samples, or sequences times epochs, than 32 bits count or memory holds.
    pub fn build(
        plan: &EpochPlan,
        range: Range<usize>,
        seed: u32,
        length: impl Fn(usize) -> usize,
    ) -> Result<Self, String> {
        let mut random = RandomState::new(seed);
        let document_index = document_index(plan, range, &mut random)?;
        let sample_index = sample_index(plan, &document_index, length)?;
        let shuffle_index = shuffle_index(plan, &mut random)?;
        Ok(Self {
            document_index,
            sample_index,
            shuffle_index,
        })
    }

    /// Where the sample given out as number `i` lies.
    pub fn parts(&self, i: usize) -> Option<Parts> {
        let sample = *self.shuffle_index.get(i)? as usize;
        Some(Parts {
            first: self.sample_index[sample],
            last: self.sample_index[sample + 1],
        })
    }
}

fn document_index(
    plan: &EpochPlan,
    range: Range<usize>,
    random: &mut RandomState,
) -> Result<Vec<u32>, String> {
    let per_epoch = range.len() as u64;
    if u32::try_from(range.end).is_err() {
        return Err(format!("sequence {} is past 2^32", range.end));
    }
    let total = per_epoch.saturating_mul(plan.num_epochs);
    let mut index: Vec<u32> = reserve(total, "sequences times epochs")?;
    for _ in 0..plan.num_epochs {
        index.extend(range.start as u32..range.end as u32);
    }
    match plan.samples_sans_final_epoch {
        Some(_) => {
            let (first, last) = index.split_at_mut((total - per_epoch) as usize);
            random.shuffle(first);
            random.shuffle(last);
        }
        None => random.shuffle(&mut index),
    }
    Ok(index)
}

/// A sample that ends with the last token of a sequence ends *in* it; its successor starts there
/// too, with the shared token (or, without the extra token, with nothing of it).
fn sample_index(
    plan: &EpochPlan,
    document_index: &[u32],
    length: impl Fn(usize) -> usize,
) -> Result<Vec<Start>, String> {
    let mut samples = reserve(plan.num_samples + 1, "samples")?;
    let start = |position: usize, offset: u64| Start {
        position: position as u32,
        // A sequence has at most 2^31 tokens.
        offset: offset as u32,
    };
    let (mut position, mut offset) = (0, 0);
    let mut sequence_length = length(document_index[0] as usize) as u64;
    samples.push(start(position, offset));
    for _ in 0..plan.num_samples {
        let mut remaining = plan.seq_length + plan.extra;
        while remaining > sequence_length - offset {
            if position + 1 == document_index.len() {
                // Only a last partial sample gets here: it takes all that is left.
                remaining = sequence_length - offset;
                break;
            }
            remaining -= sequence_length - offset;
            position += 1;
            offset = 0;
            sequence_length = length(document_index[position] as usize) as u64;
        }
        offset = offset + remaining - plan.extra;
        samples.push(start(position, offset));
    }
    Ok(samples)
}

fn shuffle_index(plan: &EpochPlan, random: &mut RandomState) -> Result<Vec<u32>, String> {
    let mut index: Vec<u32> = reserve(plan.num_samples, "samples")?;
    index.extend(0..plan.num_samples as u32);
    let first = plan.samples_sans_final_epoch.unwrap_or(plan.num_samples);
    let (first, last) = index.split_at_mut(first as usize);
    random.shuffle(first);
    random.shuffle(last);
    Ok(index)
}

/// Room for `count` elements, or why there is none: a huge request must be an error, not an abort.
fn reserve<T>(count: u64, what: &str) -> Result<Vec<T>, String> {
    if count >= u64::from(u32::MAX) {
        return Err(format!("{count} {what} are more than 2^32 - 2"));
    }
    let mut values = Vec::new();
    values
        .try_reserve_exact(count as usize)
        .map_err(|_| format!("no memory for {count} {what}"))?;
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(tokens: u64, s: u64, requested: Option<u64>) -> EpochPlan {
        EpochPlan::new(tokens, s, 1, requested, true).unwrap()
    }

    #[test]
    fn epochs_are_the_fewest_that_suffice() {
        assert_eq!(plan(101, 10, None).num_epochs, 1);
        assert_eq!(plan(101, 10, Some(10)).num_epochs, 1);
        assert_eq!(plan(101, 10, Some(11)).num_epochs, 2);
        assert_eq!(plan(101, 10, Some(20)).num_epochs, 2);
        assert_eq!(plan(101, 10, Some(20)).num_samples, 20);
        assert_eq!(plan(101, 10, Some(0)).num_samples, 10);
        assert!(EpochPlan::new(10, 10, 1, None, true).is_err());
        assert_eq!(
            EpochPlan::new(10, 10, 1, None, false).unwrap().num_samples,
            1
        );
        assert_eq!(
            EpochPlan::new(10, 10, 0, None, true).unwrap().num_samples,
            1
        );
        assert!(EpochPlan::new(0, 10, 0, Some(3), true).is_err());
        assert!(EpochPlan::new(1, 10, 1, Some(3), false).is_err());
    }

    #[test]
    fn a_last_epoch_of_few_samples_is_shuffled_apart() {
        // 10 samples an epoch: below 8 of them from the last one, it stands apart.
        assert_eq!(plan(101, 10, Some(17)).samples_sans_final_epoch, Some(10));
        assert_eq!(plan(101, 10, Some(18)).samples_sans_final_epoch, None);
        assert_eq!(plan(101, 10, Some(9)).samples_sans_final_epoch, None);
    }

    /// Sequences without tokens, and samples longer than many sequences.
    #[test]
    fn samples_cover_the_stream_whatever_the_lengths() {
        let lengths = [0, 3, 0, 0, 1, 7, 2, 0];
        let total: usize = lengths.iter().sum();
        for extra in [0, 1] {
            for s in 1..=6 {
                let plan = EpochPlan::new(total as u64, s, extra, Some(9), true).unwrap();
                let indices = Indices::build(&plan, 0..8, 3, |i| lengths[i]).unwrap();
                let mut before = vec![0];
                for d in &indices.document_index {
                    before.push(before[before.len() - 1] + lengths[*d as usize] as u64);
                }
                for (k, sample) in indices.sample_index.iter().enumerate() {
                    let at = before[sample.position as usize] + u64::from(sample.offset);
                    assert_eq!(at, k as u64 * s, "extra {extra} s {s}");
                }
            }
        }
    }
}
