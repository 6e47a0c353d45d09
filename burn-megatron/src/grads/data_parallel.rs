//! What the ranks of a data-parallel group do with one another's gradients and parameters.

use super::{Buckets, Owned, SumOfSquares};
use crate::comm::{Communicator, ReduceOp};
use crate::error::{Result, Violation};
use crate::launch::ProcessGroups;
use crate::shard::ParamRecord;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How gradients are reduced and who updates what, under the names of Megatron's flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataParallelConfig {
    /// Each rank keeps and updates an equal part of the optimizer's state (ZeRO stage 1, Rajbhandari et
    /// al. 2020): gradients are reduced and scattered, and updated parameters gathered.
    pub use_distributed_optimizer: bool,
    /// Elements that are reduced, or gathered, at a time.
    pub ddp_bucket_size: usize,
    /// Reduce each bucket as soon as the last backward has its gradients, while the backward goes on.
    pub overlap_grad_reduce: bool,
    /// Gather each bucket of updated parameters in the background, and wait for it where the next forward
    /// first needs it; goes with a distributed optimizer.
    pub overlap_param_gather: bool,
}

impl DataParallelConfig {
    /// What cannot be.
    pub(crate) fn violation(&self) -> Option<Violation> {
        let gathers = self.overlap_param_gather && !self.use_distributed_optimizer;
        gathers.then(|| {
            let rule = "overlap_param_gather needs use_distributed_optimizer: otherwise nothing is gathered";
            Violation::new(rule, ["use_distributed_optimizer"])
        })
    }

    /// Whether anything is communicated beside the computation.
    pub fn overlaps(&self) -> bool {
        self.overlap_grad_reduce || self.overlap_param_gather
    }
}

impl Default for DataParallelConfig {
    fn default() -> Self {
        DataParallelConfig {
            use_distributed_optimizer: false,
            ddp_bucket_size: 40_000_000,
            overlap_grad_reduce: false,
            overlap_param_gather: false,
        }
    }
}

/// One rank's view of its data-parallel group's buffers.
#[derive(Debug)]
pub struct DataParallel {
    config: DataParallelConfig,
    buckets: Buckets,
    /// What this rank updates.
    owned: Owned,
}

impl DataParallel {
    /// For parameters in a flat buffer of `elements`, on one rank of `dp`.
    pub fn new(
        config: DataParallelConfig,
        params: &[ParamRecord],
        elements: usize,
        dp: &dyn Communicator,
    ) -> Self {
        let buckets = Buckets::new(params, elements, config.ddp_bucket_size, dp.size());
        let owned = match config.use_distributed_optimizer {
            true => Owned::shard(params, &buckets, dp.rank()),
            false => Owned::all(params, elements),
        };
        DataParallel {
            config,
            buckets,
            owned,
        }
    }

    /// The elements that this rank updates.
    pub fn owned(&self) -> &Owned {
        &self.owned
    }

    /// Sums flat gradients over the group, bucket by bucket. Under a distributed optimizer only the owned
    /// elements hold their sums then.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn reduce(&self, gradients: &mut [f32], dp: &dyn Communicator) -> Result<()> {
        if dp.size() == 1 {
            return Ok(());
        }
        for (index, bucket) in self.buckets.ranges().iter().enumerate() {
            if self.config.use_distributed_optimizer {
                let sums = scattered(&gradients[bucket.clone()], dp)?;
                gradients[self.reduced_range(index, dp)].copy_from_slice(&sums);
            } else {
                dp.all_reduce(&mut gradients[bucket.clone()], ReduceOp::Sum)?;
            }
        }
        Ok(())
    }

    /// The sums of one bucket's gradients that this rank gets: all, or those that it owns.
    pub(super) fn reduce_bucket(
        &self,
        mut gradients: Vec<f32>,
        dp: &dyn Communicator,
    ) -> Result<Vec<f32>> {
        if self.config.use_distributed_optimizer {
            return scattered(&gradients, dp);
        }
        dp.all_reduce(&mut gradients, ReduceOp::Sum)?;
        Ok(gradients)
    }

    /// Where these sums belong.
    pub(super) fn reduced_range(&self, bucket: usize, dp: &dyn Communicator) -> Range<usize> {
        let whole = self.buckets.ranges()[bucket].clone();
        match self.config.use_distributed_optimizer {
            true => {
                let len = whole.len() / dp.size();
                let start = whole.start + dp.rank() * len;
                start..start + len
            }
            false => whole,
        }
    }

    /// The buckets that gradients and parameters travel in.
    pub fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    /// The sum of squares of this rank's gradients, over the data-parallel group where each has a part, with
    /// each parameter counted once over the tensor- and pipeline-parallel groups: see
    /// [`ParamRecord::counts_at`].
    ///
    /// # Errors
    /// If another rank fails.
    pub fn squares(
        &self,
        gradients: &[f32],
        params: &[ParamRecord],
        groups: &ProcessGroups,
    ) -> Result<SumOfSquares> {
        let parts = self.owned.parts().iter();
        let mine = parts.filter(|part| params[part.param].counts_at(groups));
        let mine = mine.map(|part| SumOfSquares::of(&gradients[part.flat.clone()]));
        match self.config.use_distributed_optimizer {
            true => mine.sum::<SumOfSquares>().all_reduce(&*groups.dp.comm),
            false => Ok(mine.sum()),
        }
    }

    /// Puts every rank's owned elements, packed, to their places in `flat`.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn gather(&self, packed: &[f32], flat: &mut [f32], dp: &dyn Communicator) -> Result<()> {
        if !self.config.use_distributed_optimizer {
            flat.copy_from_slice(packed);
            return Ok(());
        }
        for (bucket, own) in self.owned_by_bucket(packed, dp.size()) {
            let all = bytemuck::cast_slice_mut(&mut flat[bucket.clone()]);
            dp.all_gather(bytemuck::cast_slice(own), all)?;
        }
        Ok(())
    }

    /// Each bucket with this rank's elements of it, of those that it owns, packed.
    pub(super) fn owned_by_bucket<'a>(
        &'a self,
        packed: &'a [f32],
        ranks: usize,
    ) -> impl Iterator<Item = (&'a Range<usize>, &'a [f32])> {
        let mut rest = packed;
        self.buckets.ranges().iter().map(move |bucket| {
            let (own, later) = rest.split_at(bucket.len() / ranks);
            rest = later;
            (bucket, own)
        })
    }
}

/// This rank's part of the sums over the group.
fn scattered(gradients: &[f32], dp: &dyn Communicator) -> Result<Vec<f32>> {
    let mut sums = vec![0.0; gradients.len() / dp.size()];
    dp.reduce_scatter(gradients, &mut sums)?;
    Ok(sums)
}
