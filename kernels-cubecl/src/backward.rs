//! What the operations' backwards have in common.

use burn::backend::Backend;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::Ops;
use burn::backend::tensor::FloatTensor;

/// Takes the output's gradient, and gives the parents theirs: `of` makes them from what was kept, that gradient, and which
/// parents want one.
pub fn give_gradients<B: Backend, S, const N: usize>(
    ops: Ops<S, N>,
    grads: &mut Gradients,
    of: impl FnOnce(S, FloatTensor<B>, [bool; N]) -> [Option<FloatTensor<B>>; N],
) {
    let dy = grads.consume::<B>(&ops.node);
    let wanted = ops.parents.each_ref().map(Option::is_some);
    let all = of(ops.state, dy, wanted);
    for (parent, gradient) in ops.parents.into_iter().zip(all) {
        if let (Some(node), Some(gradient)) = (parent, gradient) {
            grads.register::<B>(node.id, gradient);
        }
    }
}
