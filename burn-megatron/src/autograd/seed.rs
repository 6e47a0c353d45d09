//! Starting a backward from a gradient that comes from elsewhere.
//!
//! Burn starts a backward from a scalar alone. A pipeline stage has the gradient of its output
//! instead: `(y · dy).sum().backward()` would do, at the cost of keeping `y` and of two passes over
//! it. A seed is a scalar whose backward hands `dy` to `y`'s node as it is.

use super::{ParallelOps, from_dispatch};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients as NodeGradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch, DispatchKindConversion, DispatchTensor};
use burn::tensor::{Gradients, Tensor};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Where the gradient will be when the backward runs.
#[derive(Clone, Default)]
pub struct GradientSlot(Arc<Mutex<Option<DispatchTensor>>>);

impl GradientSlot {
    pub(super) fn put<const D: usize>(&self, gradient: Tensor<D>) {
        let gradient = gradient.into_dispatch();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradient);
    }

    fn take(&self) -> Option<DispatchTensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl fmt::Debug for GradientSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GradientSlot")
    }
}

/// The end of a graph whose gradient is not known yet. It keeps what the backward needs and not the
/// output's values: they are free as soon as nobody else holds them (Megatron's
/// `deallocate_output_tensor`).
#[derive(Debug)]
pub struct BackwardSeed {
    root: Tensor<1>,
    slot: GradientSlot,
}

impl BackwardSeed {
    /// The end of the graph of `output`.
    pub fn new<const D: usize>(output: Tensor<D>) -> Self {
        let (root, slot) = seed(output);
        BackwardSeed { root, slot }
    }

    /// Runs the backward from `gradient`, of the output's shape and without a graph of its own.
    pub fn backward<const D: usize>(self, gradient: Tensor<D>) -> Gradients {
        self.slot.put(gradient);
        self.root.backward()
    }
}

/// A `[1]` whose backward takes the gradient of `output` from the slot.
pub(super) fn seed<const D: usize>(output: Tensor<D>) -> (Tensor<1>, GradientSlot) {
    let slot = GradientSlot::default();
    let root = Dispatch::backward_seed(output.into_dispatch(), slot.clone());
    (Tensor::from_dispatch(root), slot)
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    output: FloatTensor<Autodiff<B, C>>,
    slot: GradientSlot,
) -> FloatTensor<Autodiff<B, C>>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    #[derive(Debug)]
    struct Seed;

    impl<B: ParallelOps> Backward<B, 1> for Seed
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        type State = GradientSlot;

        fn backward(
            self,
            ops: Ops<GradientSlot, 1>,
            grads: &mut NodeGradients,
            _: &mut Checkpointer,
        ) {
            grads.consume::<B>(&ops.node);
            let [parent] = ops.parents;
            let gradient = ops.state.take();
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent.id, from_dispatch(gradient));
            }
        }
    }

    let (output, node) = output.into_parts();
    let root = B::backward_seed(output, slot.clone());
    match Seed.prepare::<C>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(slot, root),
        OpsKind::UnTracked(prep) => prep.finish(root),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn a_seeded_backward_is_that_of_the_weighted_sum() {
        let device = Device::flex().autodiff();
        let x = || Tensor::<2>::from_data([[1.0, -2.0], [0.5, 3.0]], &device).require_grad();
        let dy = [[0.1f32, 2.0], [-3.0, 0.7]];
        let function = |x: &Tensor<2>| x.clone().powi_scalar(3) + x.clone().transpose();

        let plain = x();
        let weighted = function(&plain) * Tensor::from_data(dy, &device);
        let want = plain.grad(&weighted.sum().backward()).unwrap();

        let seeded = x();
        let seed = BackwardSeed::new(function(&seeded));
        let got = seeded
            .grad(&seed.backward(Tensor::<2>::from_data(dy, &Device::flex())))
            .unwrap();
        got.into_data().assert_eq(&want.into_data(), true);
    }
}
