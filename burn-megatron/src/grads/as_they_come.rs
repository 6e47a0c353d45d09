//! Gradients that leave the graph as soon as the backward has them: none waits for the others in memory.

use crate::autograd::take_gradient;
use crate::shard::{ParamRecord, f32s, host_data};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The module whose backward gives `take` the gradient of each parameter, once and whole, with the parameter's place in the
/// model; those of the module are the model's from `first` on. The gradients go no further.
pub(super) fn hooked<M: Module>(
    module: &M,
    first: usize,
    take: impl Fn(usize, &[f32]) + Clone + Send + Sync + 'static,
) -> M {
    module.clone().map(&mut Hooks { take, next: first })
}

struct Hooks<F> {
    take: F,
    next: usize,
}

impl<F: Fn(usize, &[f32]) + Clone + Send + Sync + 'static> ModuleMapper for Hooks<F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (index, take) = (self.next, self.take.clone());
        self.next += 1;
        let (id, device, shape) = (param.id, param.lazy_device(), param.lazy_shape());
        // The value is asked for where the forward needs it.
        let hooked = move |_: &_, _: bool| {
            take_gradient(param.val(), move |gradient: Tensor<D>| {
                take(index, f32s(&host_data(gradient)));
            })
        };
        Param::uninitialized(id, hooked, device, true, shape)
    }
}

/// The sums over a step's microbatches of the gradients of one rank, on the host.
#[derive(Debug, Clone)]
pub struct HostSums {
    sums: Arc<Mutex<Vec<f32>>>,
    /// Each parameter's elements.
    ranges: Arc<[Range<usize>]>,
}

impl HostSums {
    /// For a step whose sums start as `sums`.
    pub fn new(params: &[ParamRecord], sums: Vec<f32>) -> Self {
        HostSums {
            sums: Arc::new(Mutex::new(sums)),
            ranges: params.iter().map(|param| param.range.clone()).collect(),
        }
    }

    /// The module whose backward adds the gradients of its parameters, which are those from the model's `first` on.
    pub fn hooked<M: Module>(&self, module: &M, first: usize) -> M {
        let HostSums { sums, ranges } = self.clone();
        hooked(module, first, move |param, gradient| {
            let mut sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
            add(&mut sums[ranges[param].clone()], gradient);
        })
    }

    /// The sums.
    pub fn finish(self) -> Vec<f32> {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut sums)
    }
}

/// Adds values, on all of the rank's threads.
pub(super) fn add(sums: &mut [f32], values: &[f32]) {
    const CHUNK: usize = 1 << 16;
    let chunks = sums.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK));
    chunks.for_each(|(sums, values)| {
        sums.iter_mut()
            .zip(values)
            .for_each(|(sum, value)| *sum += value);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autograd::{HooksFollow, recompute};
    use crate::launch::RankContext;
    use crate::layers::{Activation, Mlp, MlpConfig};
    use crate::shard::ParallelBuilder;
    use burn::tensor::Device;

    /// Layers that say when their backward runs: they are computed again then.
    #[test]
    fn a_layers_gradients_leave_before_the_backward_of_the_layer_below() {
        const LAYERS: usize = 4;
        let context = RankContext::single(Device::flex().autodiff());
        let mlp = MlpConfig {
            hidden_size: 8,
            ffn_hidden_size: 32,
            activation: Activation::SquaredRelu,
            bias: false,
            init_std: 0.3,
            output_init_std: 0.3,
        };
        let layers = (0..LAYERS).map(|_| mlp.init(&ParallelBuilder::new(&context)));
        let layers: Vec<Mlp> = layers.collect();
        let events = Arc::new(Mutex::new(Vec::new()));
        let taken = events.clone();
        let hooked = hooked(&layers, 0, move |param, _| {
            taken
                .lock()
                .unwrap()
                .push(format!("a weight of {}", param / 2));
        });
        let x = Tensor::<3>::ones([2, 1, 8], &context.device);
        let follow = HooksFollow::the_forward();
        let y = hooked.iter().enumerate().fold(x, |x, (layer, mlp)| {
            let events = events.clone();
            recompute(mlp, x, move |mlp, x| {
                events.lock().unwrap().push(format!("layer {layer}"));
                mlp.forward(x)
            })
        });
        drop(follow);
        events.lock().unwrap().clear();
        y.sum().backward();
        let weight = |layer| format!("a weight of {layer}");
        let want = (0..LAYERS).rev();
        let want = want.flat_map(|layer| [format!("layer {layer}"), weight(layer), weight(layer)]);
        assert_eq!(*events.lock().unwrap(), want.collect::<Vec<_>>());
    }
}
