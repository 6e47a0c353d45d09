//! The mappings into and out of tensor- and sequence-parallel regions, in conjugate pairs: the
//! backward of each is the forward of its partner. Megatron's `tensor_parallel/mappings.py`;
//! Shoeybi et al. 2019, section 3, and Korthikanti et al. 2022, section 4.2.2.
//!
//! `t` is the size of the tensor-parallel group `tp`; with `t = 1` every mapping is the identity.

use super::ParallelOps;
use super::collective::{Collective, CollectivePair};
use crate::comm::CommRef;
use burn::backend::Dispatch;
use burn::tensor::Tensor;

fn map<const D: usize>(
    x: Tensor<D>,
    forward: Collective,
    backward: Collective,
    tp: &CommRef,
) -> Tensor<D> {
    if tp.size() == 1 {
        return x;
    }
    let pair = CollectivePair {
        forward,
        backward,
        comm: tp.clone(),
    };
    Tensor::from_dispatch(Dispatch::collective(x.into_dispatch(), pair))
}

/// `f`: a replicated tensor enters a tensor-parallel region. Forward: identity; backward:
/// all-reduce of the gradient, since every rank's part of the region depends on all of `x`.
pub fn copy_to_tensor_parallel_region<const D: usize>(x: Tensor<D>, tp: &CommRef) -> Tensor<D> {
    map(x, Collective::Identity, Collective::AllReduce, tp)
}

/// `g`: the ranks' partial sums leave a tensor-parallel region as one replicated tensor. Forward:
/// all-reduce; backward: identity.
pub fn reduce_from_tensor_parallel_region<const D: usize>(x: Tensor<D>, tp: &CommRef) -> Tensor<D> {
    map(x, Collective::AllReduce, Collective::Identity, tp)
}

/// A replicated tensor `[.., n]` becomes this rank's part `[.., n/t]`. Forward: split of the last
/// dimension; backward: all-gather.
pub fn scatter_to_tensor_parallel_region<const D: usize>(x: Tensor<D>, tp: &CommRef) -> Tensor<D> {
    let dim = D - 1;
    map(
        x,
        Collective::Split { dim },
        Collective::AllGather { dim },
        tp,
    )
}

/// The ranks' parts `[.., n/t]` become one replicated tensor `[.., n]`. Forward: all-gather of the
/// last dimension; backward: split.
pub fn gather_from_tensor_parallel_region<const D: usize>(x: Tensor<D>, tp: &CommRef) -> Tensor<D> {
    let dim = D - 1;
    map(
        x,
        Collective::AllGather { dim },
        Collective::Split { dim },
        tp,
    )
}

/// A replicated tensor `[s, ..]` becomes this rank's positions `[s/t, ..]`. Forward: split of the
/// sequence; backward: all-gather.
pub fn scatter_to_sequence_parallel_region<const D: usize>(
    x: Tensor<D>,
    tp: &CommRef,
) -> Tensor<D> {
    map(
        x,
        Collective::Split { dim: 0 },
        Collective::AllGather { dim: 0 },
        tp,
    )
}

/// The ranks' positions `[s/t, ..]` enter a tensor-parallel region as `[s, ..]`. Forward: all-gather
/// of the sequence; backward: reduce-scatter, since every rank's part of the region has a gradient
/// for all positions. The conjugate of [`reduce_scatter_to_sequence_parallel_region`].
pub fn gather_from_sequence_parallel_region<const D: usize>(
    x: Tensor<D>,
    tp: &CommRef,
) -> Tensor<D> {
    map(
        x,
        Collective::AllGather { dim: 0 },
        Collective::ReduceScatter { dim: 0 },
        tp,
    )
}

/// The ranks' positions `[s/t, ..]` become one replicated tensor `[s, ..]` for a consumer that is
/// replicated too: its gradient is already whole on every rank. Forward: all-gather of the
/// sequence; backward: split. The conjugate of [`scatter_to_sequence_parallel_region`].
pub fn gather_replicated_from_sequence_parallel_region<const D: usize>(
    x: Tensor<D>,
    tp: &CommRef,
) -> Tensor<D> {
    map(
        x,
        Collective::AllGather { dim: 0 },
        Collective::Split { dim: 0 },
        tp,
    )
}

/// The ranks' partial sums `[s, ..]` leave a tensor-parallel region as this rank's positions
/// `[s/t, ..]`. Forward: reduce-scatter of the sequence; backward: all-gather. The conjugate of
/// [`gather_from_sequence_parallel_region`].
pub fn reduce_scatter_to_sequence_parallel_region<const D: usize>(
    x: Tensor<D>,
    tp: &CommRef,
) -> Tensor<D> {
    map(
        x,
        Collective::ReduceScatter { dim: 0 },
        Collective::AllGather { dim: 0 },
        tp,
    )
}
