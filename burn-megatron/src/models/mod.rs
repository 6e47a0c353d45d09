//! Models built from this crate's public parts, and what a trainer asks of a model.

pub mod gpt;

use crate::dropout::PassContext;
use burn::module::Module;
use burn::tensor::{Int, Tensor};

/// What a pipeline stage starts from.
#[derive(Debug, Clone)]
pub enum StageInput {
    /// `[b, s]`, on the first stage: the same on every rank of the tensor-parallel group.
    Tokens(Tensor<2, Int>),
    /// `[s, b, h]`, on every other: what the stage before it made. Under sequence parallelism
    /// `[s/t, b, h]`, here and wherever stages exchange it.
    Hidden(Tensor<3>),
}

/// A model that a [`Trainer`](crate::train::Trainer) can train, or one pipeline stage of it. A model
/// that is not split by depth is one stage, first and last at once.
pub trait Stage: Module {
    /// `h` of the tensors that stages exchange.
    fn hidden_size(&self) -> usize;

    /// Everything up to the next stage; on the last stage, up to what
    /// [`loss`](Stage::loss) starts from.
    ///
    /// # Shapes
    /// - input: the first stage gets tokens, every other the output of the stage before it
    /// - output: `[s, b, h]`
    ///
    /// `context` says which pass of the run it is: hand it to layers with dropout. A layer whose
    /// parameters are its own says with [`reached`](crate::autograd::reached) where it begins, as this crate's do: then
    /// their gradients leave as soon as the backward has passed it, and do not wait for its end.
    fn forward(&self, input: StageInput, context: &PassContext) -> Tensor<3>;

    /// The loss of every token, before any mask. Called on the last stage alone.
    ///
    /// # Shapes
    /// - hidden: the stage's own output, `[s, b, h]`
    /// - labels: `[b, s]`, the same on every rank of the tensor-parallel group
    /// - output: `[b, s]`, likewise
    fn loss(&self, hidden: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<2>;

    /// The same, where it is known what each token's loss will be multiplied by before they are added up:
    /// `weights [b, s]`, row after row. A model whose loss can use it, as
    /// [`head_loss`](crate::autograd::head_loss) does, replaces this. The loss itself does not depend on it.
    fn weighted_loss(
        &self,
        hidden: Tensor<3>,
        labels: Tensor<2, Int>,
        weights: &[f32],
    ) -> Tensor<2> {
        let _ = weights;
        self.loss(hidden, labels)
    }
}
