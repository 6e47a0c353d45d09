//! Looking at a gradient as soon as the backward has it.

use super::{ParallelOps, into_dispatch};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients as NodeGradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch, DispatchKindConversion, DispatchTensor};
use burn::tensor::Tensor;
use std::fmt;
use std::sync::Arc;

/// `x` itself, whose gradient goes to `hook` in the backward, once and whole, and no further.
pub fn take_gradient<const D: usize>(
    x: Tensor<D>,
    hook: impl Fn(Tensor<D>) + Send + Sync + 'static,
) -> Tensor<D> {
    let hook = GradHook(Arc::new(move |gradient| {
        hook(Tensor::from_dispatch(gradient))
    }));
    Tensor::from_dispatch(Dispatch::grad_hook(x.into_dispatch(), hook))
}

/// What is done with the gradient.
#[derive(Clone)]
pub struct GradHook(Arc<dyn Fn(DispatchTensor) + Send + Sync>);

impl fmt::Debug for GradHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GradHook")
    }
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    hook: GradHook,
) -> FloatTensor<Autodiff<B, C>>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    #[derive(Debug)]
    struct HookBackward;

    impl<B: ParallelOps> Backward<B, 1> for HookBackward
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        type State = GradHook;

        fn backward(self, ops: Ops<GradHook, 1>, grads: &mut NodeGradients, _: &mut Checkpointer) {
            let gradient = grads.consume::<B>(&ops.node);
            (ops.state.0)(into_dispatch::<B>(gradient));
        }
    }

    let (x, node) = x.into_parts();
    match HookBackward.prepare::<C>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(hook, x),
        OpsKind::UnTracked(prep) => prep.finish(x),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use std::sync::Mutex;

    #[test]
    fn the_hook_gets_the_sum_of_all_uses() {
        let x = Tensor::<1>::from_data([1.0, -2.0], &Device::flex().autodiff()).require_grad();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let into = seen.clone();
        let hooked = take_gradient(x.clone(), move |gradient| {
            into.lock().unwrap().push(gradient.into_data());
        });
        let y = hooked.clone() * 3.0 + hooked.powi_scalar(2);
        let gradients = y.sum().backward();
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 1);
        seen[0].assert_eq(&[5.0f32, -1.0].into(), true);
        assert!(x.grad(&gradients).is_none());
    }
}
