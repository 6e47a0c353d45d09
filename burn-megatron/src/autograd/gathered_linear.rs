//! A linear layer over a sequence of which each tensor-parallel rank has a part.

use super::ParallelOps;
use super::collective::{self, Collective};
use crate::comm::CommRef;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch};
use burn::tensor::Tensor;
use burn_megatron_kernels::backward::give_gradients;
use burn_megatron_kernels::bias::Bias;
use burn_megatron_kernels::linear::{self, linear};
use burn_megatron_kernels::{Fused, Kernels};

/// `gather(x) · weightᵀ + bias` for an input `x [s/t, .., in]` of which each rank has its positions, and a bias if there is
/// one: the sequence is gathered for the product and not kept. The backward gathers it again, and scatters the
/// input's gradient. Korthikanti et al. 2022, section 4.2.2; Megatron's
/// `LinearWithGradAccumulationAndAsyncCommunication`.
///
/// # Shapes
/// - `x`: `[s/t, .., in]`, `weight`: `[out, in]`, `bias`: `[out]`
/// - output: `[s, .., out]`
pub fn gathered_linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    tp: &CommRef,
    kernels: Kernels,
) -> Tensor<D> {
    if tp.size() == 1 {
        return linear(x, weight, bias, kernels);
    }
    Tensor::from_dispatch(Dispatch::gathered_linear(
        x.into_dispatch(),
        weight.into_dispatch(),
        bias.into(),
        tp.clone(),
        kernels,
    ))
}

/// The whole sequence `[s, .., in]`.
fn gathered<B: Backend>(x: FloatTensor<B>, tp: &CommRef) -> FloatTensor<B> {
    collective::run::<B>(x, Collective::AllGather { dim: 0 }, tp)
}

pub(super) fn forward<B: Fused>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    tp: &CommRef,
    kernels: Kernels,
) -> FloatTensor<B> {
    linear::forward::<B>(gathered::<B>(x, tp), weight, bias, kernels)
}

pub(super) fn autodiff<B: ParallelOps + Fused, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Bias<Autodiff<B, C>>,
    tp: CommRef,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct GatheredLinearBackward;

    impl<B: ParallelOps + Fused> Backward<B, 3> for GatheredLinearBackward {
        /// This rank's positions of `x`, the weight, and who has the others.
        type State = (FloatTensor<B>, FloatTensor<B>, CommRef, Kernels);

        fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
            give_gradients::<B, _, _>(ops, grads, |(x, weight, tp, kernels), dy, wanted| {
                let x = gathered::<B>(x, &tp);
                let [dx, d_weight, d_bias] = linear::backward::<B>(x, weight, dy, wanted, kernels);
                let scatter = Collective::ReduceScatter { dim: 0 };
                let dx = dx.map(|dx| collective::run::<B>(dx, scatter, &tp));
                [dx, d_weight, d_bias]
            });
        }
    }

    let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
    let (bias, bias_node) = bias.into_parts(&x);
    let y = forward::<B>(x.clone(), weight.clone(), bias, &tp, kernels);
    match GatheredLinearBackward
        .prepare::<C>([x_node, weight_node, bias_node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((x, weight, tp, kernels), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}
