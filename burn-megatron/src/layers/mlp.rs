//! The feed-forward part of a block, its inner features split over the tensor-parallel ranks.

use super::block::{Sublayer, TransformerConfig};
use super::{
    ColumnParallelLinear, ColumnParallelLinearConfig, RowParallelLinear, RowParallelLinearConfig,
};
use crate::autograd::{GeluApproximation, gelu};
use crate::shard::ParallelBuilder;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of an [`Mlp`].
#[derive(Debug, Clone)]
pub struct MlpConfig {
    pub hidden_size: usize,
    /// Over all ranks; a multiple of `t`.
    pub ffn_hidden_size: usize,
    pub gelu: GeluApproximation,
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
            gelu: config.gelu,
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
            linear_fc1: ColumnParallelLinearConfig::new(h, ffn)
                .with_init_std(self.init_std)
                .init(builder),
            linear_fc2: RowParallelLinearConfig::new(ffn, h)
                .with_init_std(self.output_init_std)
                .init(builder),
            gelu: self.gelu,
        }
    }
}

/// `fc2(gelu(fc1(x)))`: split by columns, then by rows, so that one all-reduce serves both.
/// Megatron's `transformer/mlp.py`; Shoeybi et al. 2019, figure 3a.
#[derive(Module, Debug)]
pub struct Mlp {
    /// `h -> ffn/t`
    pub linear_fc1: ColumnParallelLinear,
    /// `ffn/t -> h`
    pub linear_fc2: RowParallelLinear,
    #[module(skip)]
    gelu: GeluApproximation,
}

impl Mlp {
    /// `[s, b, h] -> [s, b, h]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let (inner, _) = self.linear_fc1.forward(x);
        self.linear_fc2.forward(gelu(inner, self.gelu)).0
    }
}

impl Sublayer for Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        Mlp::forward(self, x)
    }
}
