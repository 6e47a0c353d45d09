//! The feed-forward part of a block, its inner features split over the tensor-parallel ranks.

use super::block::{Sublayer, TransformerConfig};
use super::{
    ColumnParallelLinear, ColumnParallelLinearConfig, RowParallelLinear, RowParallelLinearConfig,
};
use crate::Kernels;
use crate::autograd::{gelu, swiglu};
use crate::dropout::PassContext;
use crate::shard::ParallelBuilder;
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::activation::relu;
pub use burn_megatron_kernels::Activation;

/// Configuration of an [`Mlp`].
#[derive(Debug, Clone)]
pub struct MlpConfig {
    pub hidden_size: usize,
    /// Over all ranks; a multiple of `t`.
    pub ffn_hidden_size: usize,
    pub activation: Activation,
    pub bias: bool,
    /// Standard deviation of the initial weights of `linear_fc1`.
    pub init_std: f64,
    /// Standard deviation of the initial weights of `linear_fc2`.
    pub output_init_std: f64,
}

impl From<&TransformerConfig> for MlpConfig {
    fn from(config: &TransformerConfig) -> Self {
        MlpConfig {
            hidden_size: config.hidden_size,
            ffn_hidden_size: config.ffn_hidden_size,
            activation: config.activation,
            bias: config.add_bias_linear,
            init_std: config.init_method_std,
            output_init_std: config.output_init_std(),
        }
    }
}

impl MlpConfig {
    /// The rank's inner features.
    pub fn init(&self, builder: &ParallelBuilder) -> Mlp {
        let (h, ffn) = (self.hidden_size, self.ffn_hidden_size);
        Mlp {
            linear_fc1: ColumnParallelLinearConfig::new(h, self.activation.inputs() * ffn)
                .with_output_blocks(self.activation.inputs())
                .with_bias(self.bias)
                .with_skip_bias_add(matches!(self.activation, Activation::Gelu(_)))
                .with_init_std(self.init_std)
                .init(builder),
            linear_fc2: RowParallelLinearConfig::new(ffn, h)
                .with_bias(self.bias)
                .with_init_std(self.output_init_std)
                .init(builder),
            activation: self.activation,
            kernels: builder.kernels(),
        }
    }
}

/// `fc2(activation(fc1(x)))`: split by columns, then by rows, so that one all-reduce serves both.
/// Megatron's `transformer/mlp.py`; Shoeybi et al. 2019, figure 3a.
#[derive(Module, Debug)]
pub struct Mlp {
    /// `h -> ffn/t`, or twice that for a gated activation
    pub linear_fc1: ColumnParallelLinear,
    /// `ffn/t -> h`
    pub linear_fc2: RowParallelLinear,
    #[module(skip)]
    activation: Activation,
    #[module(skip)]
    kernels: Kernels,
}

impl Mlp {
    /// `[s, b, h] -> [s, b, h]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let (inner, bias) = self.linear_fc1.forward(x);
        if self.kernels.fuse_on(&inner.device(), inner.dtype()) {
            // Between the two nothing is kept.
            return self
                .linear_fc2
                .forward_activated(inner, bias, self.activation)
                .0;
        }
        let inner = match (self.activation, bias) {
            (Activation::Gelu(how), bias) => gelu(inner, bias, how, self.kernels),
            (Activation::SwiGlu, _) => swiglu(inner, self.kernels),
            (Activation::SquaredRelu, _) => {
                let inner = relu(inner);
                inner.clone() * inner
            }
        };
        self.linear_fc2.forward(inner).0
    }
}

impl Sublayer for Mlp {
    fn forward(&self, x: Tensor<3>, _: &PassContext) -> Tensor<3> {
        Mlp::forward(self, x)
    }
}
