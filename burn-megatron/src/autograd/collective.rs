//! A collective over a tensor, with the collective that is its conjugate in the backward.

use super::{ParallelOps, to_host};
use crate::Precision;
use crate::comm::{CommRef, ReduceOp, raise};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, TensorMetadata};
use burn::tensor::Slice;

/// A collective over a tensor; `dim` is the dimension along which ranks hold parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    Identity,
    /// The sum over the ranks, on every rank.
    AllReduce,
    /// The ranks' tensors side by side along `dim`.
    AllGather {
        dim: usize,
    },
    /// This rank's part along `dim` of the sum over the ranks.
    ReduceScatter {
        dim: usize,
    },
    /// This rank's part along `dim` of a tensor that every rank holds whole.
    Split {
        dim: usize,
    },
}

/// What runs on the values in the forward, and on the gradient in the backward.
#[derive(Debug, Clone)]
pub struct CollectivePair {
    pub forward: Collective,
    pub backward: Collective,
    pub comm: CommRef,
}

/// Runs one collective. A failure unwinds as [`raise`] says: neither a layer's forward nor a
/// backward step can return it.
pub(super) fn run<B: Backend>(
    x: FloatTensor<B>,
    what: Collective,
    comm: &CommRef,
) -> FloatTensor<B> {
    if comm.size() == 1 {
        return x;
    }
    match what {
        Collective::Identity => x,
        Collective::AllReduce => all_reduce::<B>(x, comm),
        Collective::AllGather { dim } => all_gather::<B>(x, dim, comm),
        Collective::ReduceScatter { dim } => reduce_scatter::<B>(x, dim, comm),
        Collective::Split { dim } => part::<B>(x, dim, comm.rank(), comm.size()),
    }
}

fn all_reduce<B: Backend>(x: FloatTensor<B>, comm: &CommRef) -> FloatTensor<B> {
    let device = x.device();
    let precision = Precision::of(x.dtype());
    let mut data = to_host::<B>(x);
    comm.all_reduce_values(precision.values_mut(&mut data), ReduceOp::Sum)
        .unwrap_or_else(|e| raise(e));
    B::float_from_data(data, &device)
}

fn all_gather<B: Backend>(x: FloatTensor<B>, dim: usize, comm: &CommRef) -> FloatTensor<B> {
    let (device, shape, precision) = (x.device(), x.shape(), Precision::of(x.dtype()));
    let data = to_host::<B>(x);
    let send = data.as_bytes();
    let mut recv = vec![0u8; send.len() * comm.size()];
    comm.all_gather(send, &mut recv)
        .unwrap_or_else(|e| raise(e));
    let parts = recv.chunks(send.len());
    let parts = parts.map(|part| precision.data(part, shape.clone()));
    let parts = parts.map(|part| B::float_from_data(part, &device));
    B::float_cat(parts.collect(), dim)
}

fn reduce_scatter<B: Backend>(x: FloatTensor<B>, dim: usize, comm: &CommRef) -> FloatTensor<B> {
    let (device, precision) = (x.device(), Precision::of(x.dtype()));
    // The ranks' parts, one after another.
    let parts = (0..comm.size()).map(|rank| part::<B>(x.clone(), dim, rank, comm.size()));
    let parts: Vec<FloatTensor<B>> = parts.collect();
    let shape = parts[0].shape();
    let mut send = to_host::<B>(B::float_cat(parts, 0));
    let mut recv = precision.data(&vec![0u8; precision.bytes() * shape.num_elements()], shape);
    let send = precision.values_mut(&mut send);
    comm.reduce_scatter_values(send.as_values(), precision.values_mut(&mut recv))
        .unwrap_or_else(|e| raise(e));
    B::float_from_data(recv, &device)
}

/// Part `rank` of `size` equal parts of `x` along `dim`.
fn part<B: Backend>(x: FloatTensor<B>, dim: usize, rank: usize, size: usize) -> FloatTensor<B> {
    let shape = x.shape();
    assert_eq!(
        shape[dim] % size,
        0,
        "dimension {dim} of {shape:?} in {size} equal parts"
    );
    let len = shape[dim] / size;
    let slices: Vec<Slice> = (0..shape.num_dims())
        .map(|d| {
            if d == dim {
                rank * len..(rank + 1) * len
            } else {
                0..shape[d]
            }
        })
        .map(Slice::from)
        .collect();
    B::float_slice(x, &slices)
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    pair: CollectivePair,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct Conjugate;

    impl<B: ParallelOps> Backward<B, 1> for Conjugate {
        type State = CollectivePair;

        fn backward(
            self,
            ops: Ops<CollectivePair, 1>,
            grads: &mut Gradients,
            _: &mut Checkpointer,
        ) {
            let pair = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                run::<B>(grad, pair.backward, &pair.comm)
            });
        }
    }

    let (x, node) = x.into_parts();
    let out = B::collective(x, pair.clone());
    match Conjugate.prepare::<C>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(pair, out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
