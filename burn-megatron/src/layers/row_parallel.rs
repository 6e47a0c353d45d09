//! A linear layer split by input features.

use super::{Activation, DEFAULT_INIT_STD, add_bias};
use crate::Kernels;
use crate::autograd::{
    activated_linear, linear, reached, reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region, scatter_to_tensor_parallel_region,
};
use crate::comm::CommRef;
use crate::shard::{Init, ParallelBuilder, ParamSpec};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// Configuration of a [`RowParallelLinear`].
#[derive(Config, Debug)]
pub struct RowParallelLinearConfig {
    /// Over all ranks; a multiple of `t`.
    pub input_size: usize,
    pub output_size: usize,
    #[config(default = true)]
    pub bias: bool,
    /// The input is already split, as a [`ColumnParallelLinear`](super::ColumnParallelLinear)
    /// leaves it; otherwise it is the whole, and each rank takes its part.
    #[config(default = true)]
    pub input_is_parallel: bool,
    /// Return the bias beside the output instead of adding it, for a consumer that fuses the sum.
    #[config(default = false)]
    pub skip_bias_add: bool,
    /// Standard deviation of the initial weights.
    #[config(default = "DEFAULT_INIT_STD")]
    pub init_std: f64,
}

impl RowParallelLinearConfig {
    /// The rank's part of the layer.
    ///
    /// # Panics
    /// If `input_size` is not a multiple of `t`.
    pub fn init(&self, builder: &ParallelBuilder) -> RowParallelLinear {
        let init = Init::Normal { std: self.init_std };
        let bias = || builder.param(ParamSpec::replicated([self.output_size], Init::Zeros));
        RowParallelLinear {
            weight: builder.param(builder.split([self.output_size, self.input_size], 1, init)),
            bias: self.bias.then(bias),
            input_is_parallel: self.input_is_parallel,
            skip_bias_add: self.skip_bias_add,
            sequence_parallel: builder.sequence_parallel(),
            kernels: builder.kernels(),
            tp: builder.tp().clone(),
        }
    }
}

/// `y = x Wᵀ + b` with the columns of `W = [W₁, …, W_t]` and the features of `x` split over the
/// ranks: `y = Σᵢ xᵢ Wᵢᵀ + b`, the bias added once. Megatron's `tensor_parallel/layers.py`,
/// `RowParallelLinear`.
#[derive(Module, Debug)]
pub struct RowParallelLinear {
    /// `[output, input/t]`
    pub weight: Param<Tensor<2>>,
    /// `[output]`, the same on every rank
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    input_is_parallel: bool,
    #[module(skip)]
    skip_bias_add: bool,
    #[module(skip)]
    sequence_parallel: bool,
    #[module(skip)]
    kernels: Kernels,
    #[module(skip)]
    tp: CommRef,
}

impl RowParallelLinear {
    /// Returns the output, and the bias if it was not added (`skip_bias_add`).
    ///
    /// # Shapes
    /// - input: `[.., input/t]`, or `[.., input]` without `input_is_parallel`
    /// - output: `[.., output]`, the same on every rank; `[s/t, .., output]` under sequence parallelism
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> (Tensor<D>, Option<Tensor<1>>) {
        reached(&x);
        let x = match self.input_is_parallel {
            true => x,
            false => scatter_to_tensor_parallel_region(x, &self.tp),
        };
        self.output(|weight, bias| linear(x, weight, bias, self.kernels))
    }

    /// The same for `activation(x + bias)`, which no graph keeps.
    ///
    /// # Panics
    /// Without `input_is_parallel`.
    pub fn forward_activated<const D: usize>(
        &self,
        x: Tensor<D>,
        bias: Option<Tensor<1>>,
        activation: Activation,
    ) -> (Tensor<D>, Option<Tensor<1>>) {
        assert!(self.input_is_parallel, "the activation's input is split");
        reached(&x);
        self.output(|weight, out_bias| {
            activated_linear(x, bias, weight, out_bias, activation, self.kernels)
        })
    }

    /// Sums the ranks' products. The bias goes into the product where it is the only one.
    fn output<const D: usize>(
        &self,
        product: impl FnOnce(Tensor<2>, Option<Tensor<1>>) -> Tensor<D>,
    ) -> (Tensor<D>, Option<Tensor<1>>) {
        let (weight, bias) = (self.weight.val(), self.bias.as_ref().map(Param::val));
        if self.tp.size() == 1 && !self.skip_bias_add {
            return (product(weight, bias), None);
        }
        let partial = product(weight, None);
        let y = match self.sequence_parallel {
            true => reduce_scatter_to_sequence_parallel_region(partial, &self.tp),
            false => reduce_from_tensor_parallel_region(partial, &self.tp),
        };
        match bias {
            Some(bias) if !self.skip_bias_add => (add_bias(y, bias), None),
            bias => (y, bias),
        }
    }
}
