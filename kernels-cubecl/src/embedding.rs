//! Rows of a table, with the backward that adds their gradients up in f32.

use crate::{Fused, KernelOps, Kernels, narrowed, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata};
use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Int, Shape, Tensor};

/// The rows `index` of a table. In the backward a row that was taken often gets the sum of many gradients;
/// under mixed precision it is added up in f32 and rounded once.
///
/// # Shapes
/// - `table`: `[rows, h]`
/// - `index`: `[n]`
/// - output: `[n, h]`
pub fn embedding_rows(table: Tensor<2>, index: Tensor<1, Int>, kernels: Kernels) -> Tensor<2> {
    let (table, index) = (table.into_dispatch(), index.into_dispatch());
    Tensor::from_dispatch(Dispatch::embedding_rows(table, index, kernels))
}

pub(crate) fn forward<B: Fused>(
    table: FloatTensor<B>,
    index: IntTensor<B>,
    kernels: Kernels,
) -> FloatTensor<B> {
    match kernels.fuse::<B>(&table) {
        true => B::fused_rows_at(table, index),
        false => B::float_select(table, 0, index),
    }
}

/// The table's gradient, of its `shape` and type.
fn table_gradient<B: Backend>(
    dy: FloatTensor<B>,
    index: IntTensor<B>,
    shape: Shape,
    dtype: DType,
) -> FloatTensor<B> {
    let dy = widened::<B>(dy);
    let zeros = B::float_zeros(shape, &dy.device(), FloatDType::from(dy.dtype()));
    let sums = B::float_select_assign(zeros, 0, index, dy, IndexingUpdateOp::Add);
    narrowed::<B>(sums, dtype)
}

pub(crate) fn autodiff<B: KernelOps + Fused, C: CheckpointStrategy>(
    table: FloatTensor<Autodiff<B, C>>,
    index: IntTensor<B>,
    kernels: Kernels,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct EmbeddingBackward;

    impl<B: KernelOps + Fused> Backward<B, 1> for EmbeddingBackward {
        /// The table with its place in the graph, the rows taken, and the kernels.
        type State = (FloatTensor<Autodiff<B>>, IntTensor<B>, Kernels);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let (table, index, kernels) = ops.state;
            let dy = grads.consume::<B>(&ops.node);
            let [Some(node)] = ops.parents else { return };
            let (shape, dtype) = (table.shape(), table.dtype());
            let gradient = match kernels.fuse::<B>(&dy) {
                // Into what the table has got so far: an output layer that is tied to it comes first.
                true => {
                    let sums = grads.remove::<B>(&table).unwrap_or_else(|| {
                        B::float_zeros(shape, &dy.device(), FloatDType::from(dtype))
                    });
                    B::fused_add_rows_at(sums, index, dy)
                }
                false => table_gradient::<B>(dy, index, shape, dtype),
            };
            grads.register::<B>(node.id, gradient);
        }
    }

    let whole = table.clone();
    let (table, node) = table.into_parts();
    let rows = forward::<B>(table, index.clone(), kernels);
    match EmbeddingBackward
        .prepare::<C>([node])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((whole, index, kernels), rows),
        OpsKind::UnTracked(prep) => prep.finish(rows),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn a_row_that_is_taken_often_gets_every_gradient() {
        // In bf16 a running sum of ones would stop at 256.
        let mut all = vec![
            (Device::flex(), Kernels::Fused, DType::F32),
            (Device::flex(), Kernels::Local, DType::F32),
            (Device::flex(), Kernels::Auto, DType::BF16),
        ];
        let cube = crate::tests::cube_devices().into_iter();
        all.extend(cube.map(|(device, kernels, dtype, _)| (device, kernels, dtype)));
        for (device, kernels, dtype) in all {
            let device = device.autodiff();
            let table = Tensor::<2>::ones([3, 2], (&device, dtype)).require_grad();
            let index = [vec![1; 1000], vec![2]].concat();
            let index = Tensor::from_data(&index[..], &device);
            let rows = embedding_rows(table.clone(), index, kernels);
            assert_eq!(rows.dims(), [1001, 2]);
            let gradient = table.grad(&rows.sum().backward()).unwrap().into_data();
            assert_eq!(gradient.dtype(), dtype);
            let values: Vec<f32> = gradient.iter().collect();
            assert_eq!(values, [0.0, 0.0, 1000.0, 1000.0, 1.0, 1.0]);
        }
    }
}
