//! What the ranks of a data-parallel group do with one another's gradients and parameters.

use super::{Buckets, Owned, SumOfSquares};
use crate::Precision;
use crate::comm::{Communicator, ReduceOp, Values, ValuesMut};
use crate::error::{Result, Violation};
use crate::launch::ProcessGroups;
use crate::shard::{FlatBuffer, ParamRecord, ShardedModel};
use burn::module::Module;
use burn::tensor::bf16;
use burn_megatron_kernels::flat::Ranges;
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
    /// Gradients travel between ranks in bf16; each rank's own sums stay in f32. Goes with bf16.
    pub grad_reduce_in_bf16: bool,
}

impl DataParallelConfig {
    /// What cannot be, for a model of that type.
    pub(crate) fn violations(&self, precision: Precision) -> Vec<Violation> {
        let gathers = self.overlap_param_gather && !self.use_distributed_optimizer;
        let gathers = gathers.then(|| {
            let rule = "overlap_param_gather needs use_distributed_optimizer: otherwise nothing is gathered";
            Violation::new(rule, ["use_distributed_optimizer"])
        });
        let rounds = self.grad_reduce_in_bf16 && precision != Precision::Bf16;
        let rounds = rounds.then(|| {
            let rule = format!(
                "grad_reduce_in_bf16 goes with bf16, not with {}",
                precision.name()
            );
            Violation::new(rule, ["bf16"])
        });
        gathers.into_iter().chain(rounds).collect()
    }

    /// What gradients travel in.
    pub(crate) fn gradient_precision(&self) -> Precision {
        match self.grad_reduce_in_bf16 {
            true => Precision::Bf16,
            false => Precision::Fp32,
        }
    }

    /// Whether the model's parameters and the optimizer's are the same values on a host of so many data-parallel
    /// ranks: both in f32, and all of the rank's own.
    pub(crate) fn shares_weights(&self, precision: Precision, dp: usize) -> bool {
        precision == Precision::Fp32 && (dp == 1 || !self.use_distributed_optimizer)
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
            grad_reduce_in_bf16: false,
        }
    }
}

/// One rank's view of its data-parallel group's buffers.
#[derive(Debug)]
pub struct DataParallel {
    config: DataParallelConfig,
    /// Of the parameters.
    precision: Precision,
    buckets: Buckets,
    /// What this rank updates.
    owned: Owned,
}

impl DataParallel {
    /// For a model's parameters, on one rank of `dp`.
    pub fn new<M: Module>(
        config: DataParallelConfig,
        model: &ShardedModel<M>,
        dp: &dyn Communicator,
    ) -> Self {
        let (params, elements) = (model.params(), model.num_elements());
        let buckets = Buckets::new(params, elements, config.ddp_bucket_size, dp.size());
        let owned = match config.use_distributed_optimizer {
            true => Owned::shard(params, &buckets, dp.rank()),
            false => Owned::all(params, elements),
        };
        DataParallel {
            config,
            precision: model.precision(),
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
                let sums = self.scattered(&gradients[bucket.clone()], dp)?;
                gradients[self.reduced_range(index, dp)].copy_from_slice(&sums);
            } else {
                self.all_reduce(&mut gradients[bucket.clone()], dp)?;
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
            return self.scattered(&gradients, dp);
        }
        self.all_reduce(&mut gradients, dp)?;
        Ok(gradients)
    }

    /// The sums over the group, in place.
    fn all_reduce(&self, gradients: &mut [f32], dp: &dyn Communicator) -> Result<()> {
        if !self.config.grad_reduce_in_bf16 {
            return dp.all_reduce(gradients, ReduceOp::Sum);
        }
        let mut rounded = in_bf16(gradients);
        dp.all_reduce_values(ValuesMut::Bf16(&mut rounded), ReduceOp::Sum)?;
        let sums = gradients.iter_mut().zip(&rounded);
        sums.for_each(|(sum, rounded)| *sum = rounded.to_f32());
        Ok(())
    }

    /// This rank's part of the sums over the group.
    fn scattered(&self, gradients: &[f32], dp: &dyn Communicator) -> Result<Vec<f32>> {
        let len = gradients.len() / dp.size();
        if !self.config.grad_reduce_in_bf16 {
            let mut sums = vec![0.0; len];
            dp.reduce_scatter(gradients, &mut sums)?;
            return Ok(sums);
        }
        let mut sums = vec![bf16::ZERO; len];
        let send = in_bf16(gradients);
        dp.reduce_scatter_values(Values::Bf16(&send), ValuesMut::Bf16(&mut sums))?;
        Ok(sums.into_iter().map(bf16::to_f32).collect())
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

    /// The type that parameters travel in.
    pub(super) fn precision(&self) -> Precision {
        self.precision
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
        gradients: &FlatBuffer,
        params: &[ParamRecord],
        groups: &ProcessGroups,
    ) -> Result<SumOfSquares> {
        let parts = self.owned.parts().iter();
        let mine = parts.filter(|part| params[part.param].counts_at(groups));
        let mine = mine.map(|part| part.flat.clone());
        let mine: SumOfSquares = match gradients {
            FlatBuffer::Host(values) => mine.map(|range| SumOfSquares::of(&values[range])).sum(),
            FlatBuffer::Device(values) => SumOfSquares::of_ranges(values, &Ranges::ascending(mine)),
        };
        match self.config.use_distributed_optimizer {
            true => mine.all_reduce(&*groups.dp.comm),
            false => Ok(mine),
        }
    }

    /// Puts every rank's owned elements, packed, to their places in `flat`, rounded to the parameters' type
    /// where they travel.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn gather(&self, packed: &[f32], flat: &mut [f32], dp: &dyn Communicator) -> Result<()> {
        if !self.config.use_distributed_optimizer {
            flat.copy_from_slice(packed);
            return Ok(());
        }
        for (bucket, own) in self.owned_by_bucket(packed, dp.size()) {
            let (own, flat) = (self.precision.encode(own), &mut flat[bucket.clone()]);
            if self.precision == Precision::Fp32 {
                dp.all_gather(&own, bytemuck::cast_slice_mut(flat))?;
                continue;
            }
            let mut all = vec![0u8; own.len() * dp.size()];
            dp.all_gather(&own, &mut all)?;
            self.precision.decode(&all, flat);
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

fn in_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|value| bf16::from_f32(*value)).collect()
}
