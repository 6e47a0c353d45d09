//! A linear layer split by output features.

use super::DEFAULT_INIT_STD;
use crate::Kernels;
use crate::autograd::{
    copy_to_tensor_parallel_region, gather_from_tensor_parallel_region, gathered_linear, linear,
    reached,
};
use crate::comm::CommRef;
use crate::shard::{Init, ParallelBuilder};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// Configuration of a [`ColumnParallelLinear`].
#[derive(Config, Debug)]
pub struct ColumnParallelLinearConfig {
    pub input_size: usize,
    /// Over all ranks; a multiple of `t`.
    pub output_size: usize,
    #[config(default = true)]
    pub bias: bool,
    /// Equal parts of the output that are split over the ranks each by itself, such as a gate and what
    /// it gates.
    #[config(default = 1)]
    pub output_blocks: usize,
    /// Return the whole output on every rank instead of the rank's part.
    #[config(default = false)]
    pub gather_output: bool,
    /// Return the bias beside the output instead of adding it, for a consumer that fuses the sum.
    #[config(default = false)]
    pub skip_bias_add: bool,
    /// Standard deviation of the initial weights.
    #[config(default = "DEFAULT_INIT_STD")]
    pub init_std: f64,
    /// Output features that mean something, where the rest is padding of the vocabulary.
    pub unpadded_rows: Option<usize>,
}

impl ColumnParallelLinearConfig {
    /// The rank's part of the layer.
    ///
    /// # Panics
    /// If `output_size` is not a multiple of `t`.
    pub fn init(&self, builder: &ParallelBuilder) -> ColumnParallelLinear {
        let split = |shape: Vec<usize>, init| {
            let spec = builder.split(shape, 0, init);
            let spec = spec.with_blocks(self.output_blocks);
            spec.with_unpadded_rows(self.unpadded_rows)
        };
        let init = Init::Normal { std: self.init_std };
        let weight = split(vec![self.output_size, self.input_size], init);
        let bias = || builder.param(split(vec![self.output_size], Init::Zeros));
        ColumnParallelLinear {
            weight: builder.param(weight),
            bias: self.bias.then(bias),
            gather_output: self.gather_output,
            skip_bias_add: self.skip_bias_add,
            sequence_parallel: builder.sequence_parallel(),
            kernels: builder.kernels(),
            tp: builder.tp().clone(),
        }
    }
}

/// `y = x Wᵀ + b` with the rows of `W = [W₁; …; W_t]` split over the ranks: rank `i` computes
/// `yᵢ = x Wᵢᵀ + bᵢ`. Megatron's `tensor_parallel/layers.py`, `ColumnParallelLinear`.
#[derive(Module, Debug)]
pub struct ColumnParallelLinear {
    /// `[output/t, input]`
    pub weight: Param<Tensor<2>>,
    /// `[output/t]`
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    gather_output: bool,
    #[module(skip)]
    skip_bias_add: bool,
    #[module(skip)]
    sequence_parallel: bool,
    #[module(skip)]
    kernels: Kernels,
    #[module(skip)]
    tp: CommRef,
}

impl ColumnParallelLinear {
    /// Returns the output, and the bias if it was not added (`skip_bias_add`).
    ///
    /// # Shapes
    /// - input: `[.., input]`, the same on every rank; `[s/t, .., input]` under sequence parallelism,
    ///   for outputs `[s, ..]`
    /// - output: `[.., output/t]`, or `[.., output]` with `gather_output`
    /// - bias: `[output/t]`, or `[output]` with `gather_output`
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> (Tensor<D>, Option<Tensor<1>>) {
        reached(&x);
        let weight = self.weight.val();
        let bias = self.bias.as_ref().map(|bias| bias.val());
        let (added, mut bias) = match self.skip_bias_add {
            true => (None, bias),
            false => (bias, None),
        };
        let mut y = match self.sequence_parallel {
            true => gathered_linear(x, weight, added, &self.tp, self.kernels),
            false => {
                let x = copy_to_tensor_parallel_region(x, &self.tp);
                linear(x, weight, added, self.kernels)
            }
        };
        if self.gather_output {
            y = gather_from_tensor_parallel_region(y, &self.tp);
            bias = bias.map(|bias| gather_from_tensor_parallel_region(bias, &self.tp));
        }
        (y, bias)
    }
}
