//! Computing a module again in the backward instead of keeping what its graph needs (Chen et al. 2016;
//! Megatron's `tensor_parallel/random.py`, `checkpoint`).

use super::seed::{BackwardSeed, GradientSlot, seed};
use super::{ParallelOps, from_dispatch, into_dispatch, reached};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients as NodeGradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch, DispatchKindConversion, DispatchTensor, TensorMetadata};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, FloatDType, Gradients, Tensor};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// `forward(module, x)`, of which the graph keeps `x` and no more: the backward runs `forward` a second
/// time, with a graph, and that graph's backward at once. The values and gradients have the bits that
/// they would have without.
///
/// `forward` must give the same on both calls, so what it depends on beside its arguments has to be
/// captured: the [`PassContext`](crate::dropout::PassContext) makes the same dropout masks again. Burn's
/// own `Dropout` does not: the first call runs without autodiff, in which it does nothing. Collectives
/// run in both calls, on all ranks in the same order. Only `module`'s parameters and `x` get
/// gradients; other tensors that `forward` captures count as constants.
pub fn recompute<M, F, const D: usize, const E: usize>(
    module: &M,
    x: Tensor<D>,
    forward: F,
) -> Tensor<E>
where
    M: Module + 'static,
    F: Fn(&M, Tensor<D>) -> Tensor<E> + Send + 'static,
{
    let device = x.device();
    if !device.is_autodiff() {
        return forward(module, x);
    }
    reached(&x);
    let mut parameters = Parameters {
        seeds: vec![Tensor::zeros([1], (&device, DType::F32))],
        slots: Vec::new(),
    };
    module.visit(&mut parameters);
    let Parameters { seeds, slots } = parameters;

    // Without autodiff: they share the values and keep nothing of the graph alive.
    let (module, kept) = (module.valid(), x.clone().inner());
    let output = forward(&module, kept.clone());
    let replay = Replay::new(move |d_output| {
        let x = kept.autodiff().require_grad();
        // A graph of its own: its leaves are not those of the graph whose backward is under way.
        let module = module.train();
        let output = forward(&module, x.clone());
        let mut gradients =
            BackwardSeed::new(output).backward(Tensor::<E>::from_dispatch(d_output));
        module.visit(&mut HandOver {
            gradients: &mut gradients,
            slots: slots.iter(),
        });
        x.grad_remove(&mut gradients).map(Tensor::into_dispatch)
    });
    let x = x.into_dispatch();
    let parameters = Tensor::cat(seeds, 0).into_dispatch();
    let output = output.autodiff().into_dispatch();
    Tensor::from_dispatch(Dispatch::recomputed(x, parameters, output, replay))
}

/// A node for each parameter of a module, which takes the parameter's gradient from its slot.
struct Parameters {
    seeds: Vec<Tensor<1>>,
    slots: Vec<GradientSlot>,
}

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (seed, slot) = seed(param.val());
        self.seeds.push(seed);
        self.slots.push(slot);
    }
}

/// Puts the parameters' gradients into their slots.
struct HandOver<'a> {
    gradients: &'a mut Gradients,
    slots: std::slice::Iter<'a, GradientSlot>,
}

impl ModuleVisitor for HandOver<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let slot = self.slots.next().expect("one slot for each parameter");
        if let Some(gradient) = param.val().grad_remove(self.gradients) {
            slot.put(gradient);
        }
    }
}

type Run = Box<dyn FnOnce(DispatchTensor) -> Option<DispatchTensor> + Send>;

/// The second forward and its backward: from the output's gradient to the input's, and the parameters'
/// by the way.
#[derive(Clone)]
pub struct Replay(Arc<Mutex<Option<Run>>>);

impl Replay {
    fn new(run: impl FnOnce(DispatchTensor) -> Option<DispatchTensor> + Send + 'static) -> Self {
        Replay(Arc::new(Mutex::new(Some(Box::new(run)))))
    }

    /// Runs it, on the first call.
    fn run(&self, d_output: DispatchTensor) -> Option<DispatchTensor> {
        // The lock is not held while it runs: it may wait for other ranks.
        let run = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        run.and_then(|run| run(d_output))
    }
}

impl fmt::Debug for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Replay")
    }
}

pub(super) fn autodiff<B: ParallelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    parameters: FloatTensor<Autodiff<B, C>>,
    output: FloatTensor<Autodiff<B, C>>,
    replay: Replay,
) -> FloatTensor<Autodiff<B, C>>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    #[derive(Debug)]
    struct RecomputeBackward;

    impl<B: ParallelOps> Backward<B, 2> for RecomputeBackward
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        /// What to run, and how many parameters' nodes wait for it.
        type State = (Replay, usize);

        fn backward(
            self,
            ops: Ops<Self::State, 2>,
            grads: &mut NodeGradients,
            _: &mut Checkpointer,
        ) {
            let (replay, nodes) = ops.state;
            let d_output = grads.consume::<B>(&ops.node);
            let device = d_output.device();
            let dx = replay.run(into_dispatch::<B>(d_output));
            let [x, parameters] = ops.parents;
            if let (Some(x), Some(dx)) = (x, dx) {
                grads.register::<B>(x.id, from_dispatch(dx));
            }
            if let Some(parameters) = parameters {
                let zeros = B::float_zeros([nodes].into(), &device, FloatDType::F32);
                grads.register::<B>(parameters.id, zeros);
            }
        }
    }

    let (nodes, output) = (parameters.shape()[0], output.into_primitive());
    let ((_, x), (_, parameters)) = (x.into_parts(), parameters.into_parts());
    match RecomputeBackward
        .prepare::<C>([x, parameters])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((replay, nodes), output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}
