//! Looking at a gradient as soon as the backward has it.

use super::{ParallelOps, into_dispatch};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients as NodeGradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch, DispatchKindConversion, DispatchTensor};
use burn::tensor::Tensor;
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

thread_local! {
    /// Where this thread's forward is, if hooks follow it: a constant that is as deep.
    static PLACE: RefCell<Option<Place>> = const { RefCell::new(None) };
}

enum Place {
    Start,
    After(Box<Tensor<1>>),
}

/// While it lives, the hooks that this thread makes are as deep as what its forward [reached](reached()).
///
/// A backward runs the deepest nodes first, and a node is one deeper than the deepest that it is made of. A hook made of a
/// parameter alone would be one deep, and get its gradient when everything else is done.
#[derive(Debug)]
#[must_use = "hooks follow the forward while it lives"]
pub struct HooksFollow(PhantomData<*const ()>);

impl HooksFollow {
    /// For the forward that begins.
    pub fn the_forward() -> Self {
        PLACE.set(Some(Place::Start));
        HooksFollow(PhantomData)
    }
}

impl Drop for HooksFollow {
    fn drop(&mut self) {
        PLACE.set(None);
    }
}

/// Says that the forward has come to `x`: parameters that are used first from here on have their gradients as soon as the
/// backward has come back to it. The parallel layers and [`recompute`](super::recompute()) say it where they begin; so
/// does a layer with parameters of its own.
pub fn reached<const D: usize>(x: &Tensor<D>) {
    let followed = PLACE.with_borrow(Option::is_some);
    if followed && x.device().is_autodiff() {
        let here = Dispatch::place(x.clone().into_dispatch());
        let here = Box::new(Tensor::from_dispatch(here));
        PLACE.set(Some(Place::After(here)));
    }
}

/// `x` itself, whose gradient goes to `hook` in the backward, once and whole, and no further; when, [`HooksFollow`] says.
pub fn take_gradient<const D: usize>(
    x: Tensor<D>,
    hook: impl Fn(Tensor<D>) + Send + Sync + 'static,
) -> Tensor<D> {
    let hook = GradHook(Arc::new(move |gradient| {
        hook(Tensor::from_dispatch(gradient))
    }));
    let after = PLACE.with_borrow(|place| match place {
        Some(Place::After(place)) => Some(Tensor::clone(place).into_dispatch()),
        Some(Place::Start) | None => None,
    });
    let x = x.into_dispatch();
    let after = after.unwrap_or_else(|| x.clone());
    Tensor::from_dispatch(Dispatch::grad_hook(x, after, hook))
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
    after: FloatTensor<Autodiff<B, C>>,
    hook: GradHook,
) -> FloatTensor<Autodiff<B, C>>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    #[derive(Debug)]
    struct HookBackward;

    impl<B: ParallelOps> Backward<B, 2> for HookBackward
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        type State = GradHook;

        fn backward(self, ops: Ops<GradHook, 2>, grads: &mut NodeGradients, _: &mut Checkpointer) {
            let gradient = grads.consume::<B>(&ops.node);
            (ops.state.0)(into_dispatch::<B>(gradient));
        }
    }

    let (x, node) = x.into_parts();
    let prepared = HookBackward.prepare::<C>([node, after.node()]);
    match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(hook, x),
        OpsKind::UnTracked(prep) => prep.finish(x),
    }
}

/// A value of its own, as deep as `x`: what is made of it gets no gradient from here.
pub(super) fn place<B: ParallelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct Nothing;

    impl<B: ParallelOps> Backward<B, 1> for Nothing {
        type State = ();

        fn backward(self, _: Ops<(), 1>, _: &mut NodeGradients, _: &mut Checkpointer) {}
    }

    let (x, node) = x.into_parts();
    let value = B::place(x);
    match Nothing.prepare::<C>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((), value),
        OpsKind::UnTracked(prep) => prep.finish(value),
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
