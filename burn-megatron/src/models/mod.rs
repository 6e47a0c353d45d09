//! Models built from this crate's public parts, and what a trainer asks of a model.

pub mod gpt;

use burn::module::Module;
use burn::tensor::{Int, Tensor};

/// A model that a [`Trainer`](crate::train::Trainer) can train: it turns one microbatch of tokens
/// into a loss for each.
pub trait Stage: Module {
    /// The loss of every token, before any mask.
    ///
    /// # Shapes
    /// - tokens, labels: `[b, s]`, the same on every rank of the tensor-parallel group
    /// - output: `[b, s]`, likewise
    fn loss(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>) -> Tensor<2>;
}
