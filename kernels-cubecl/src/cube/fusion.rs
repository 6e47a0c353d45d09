//! The same kernels for tensors whose operations are gathered first and fused: what an operation needs is computed
//! before it, and it runs at once.

use crate::Fused;
use crate::adamw::AdamWFactors;
use crate::attention::AttentionOptions;
use crate::dropout::HiddenKeep;
use crate::flat::{Part, Ranges};
use crate::gelu::GeluApproximation;
use crate::head_loss::{HeadLoss, HeadShard};
use crate::rotary::{Heads, RotaryTable};
use burn::backend::TensorMetadata;
use burn::backend::fusion::stream::StreamId;
use burn::backend::fusion::{Fusion, NoOp, get_client};
use burn::backend::ir::{BackendIr, InitOperationIr, OperationIr};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use std::ops::Range;

type B = CubeBackend;
type Lazy = burn::backend::tensor::FloatTensor<Fusion<B>>;

fn now(x: Lazy) -> CubeTensor {
    x.client.clone().resolve_tensor_float::<B>(x)
}

fn lazy(x: CubeTensor) -> Lazy {
    let client = get_client::<B>(&x.device);
    let (shape, dtype) = (x.shape(), x.dtype);
    let handle = B::float_tensor_handle(x);
    let init = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
    let init = OperationIr::Init(init);
    let mut made = client.register(StreamId::current(), init, NoOp::<B>::new());
    made.swap_remove(0)
}

impl Fused for Fusion<CubeBackend> {
    fn fuses(device: &CubeDevice, dtype: DType) -> bool {
        B::fuses(device, dtype)
    }

    fn fused_layer_norm(x: Lazy, weight: Lazy, bias: Lazy, epsilon: f64) -> (Lazy, Lazy) {
        let (y, stats) = B::fused_layer_norm(now(x), now(weight), now(bias), epsilon);
        (lazy(y), lazy(stats))
    }

    fn fused_layer_norm_backward(
        x: Lazy,
        stats: Lazy,
        weight: Lazy,
        dy: Lazy,
        so_far: Option<Lazy>,
    ) -> [Lazy; 3] {
        let [x, stats, weight, dy] = [x, stats, weight, dy].map(now);
        B::fused_layer_norm_backward(x, stats, weight, dy, so_far.map(now)).map(lazy)
    }

    fn fused_rms_norm(x: Lazy, weight: Lazy, epsilon: f64) -> (Lazy, Lazy) {
        let (y, scale) = B::fused_rms_norm(now(x), now(weight), epsilon);
        (lazy(y), lazy(scale))
    }

    fn fused_rms_norm_backward(
        x: Lazy,
        scale: Lazy,
        weight: Lazy,
        dy: Lazy,
        so_far: Option<Lazy>,
    ) -> [Lazy; 2] {
        let [x, scale, weight, dy] = [x, scale, weight, dy].map(now);
        B::fused_rms_norm_backward(x, scale, weight, dy, so_far.map(now)).map(lazy)
    }

    fn fused_added_norm(
        x: Lazy,
        residual: Lazy,
        weight: Lazy,
        bias: Option<Lazy>,
        epsilon: f64,
    ) -> [Lazy; 3] {
        let (x, residual, weight) = (now(x), now(residual), now(weight));
        B::fused_added_norm(x, residual, weight, bias.map(now), epsilon).map(lazy)
    }

    fn fused_dropout_add(x: Lazy, residual: Option<Lazy>, keep: &HiddenKeep) -> Lazy {
        lazy(B::fused_dropout_add(now(x), residual.map(now), keep))
    }

    fn fused_gelu(x: Lazy, bias: Option<Lazy>, how: GeluApproximation) -> Lazy {
        lazy(B::fused_gelu(now(x), bias.map(now), how))
    }

    fn fused_gelu_backward(
        x: Lazy,
        bias: Option<Lazy>,
        how: GeluApproximation,
        dy: Lazy,
    ) -> (Lazy, Option<Lazy>) {
        let (dx, d_bias) = B::fused_gelu_backward(now(x), bias.map(now), how, now(dy));
        (lazy(dx), d_bias.map(lazy))
    }

    fn fused_swiglu(x: Lazy) -> Lazy {
        lazy(B::fused_swiglu(now(x)))
    }

    fn fused_swiglu_backward(x: Lazy, dy: Lazy) -> Lazy {
        lazy(B::fused_swiglu_backward(now(x), now(dy)))
    }

    fn fused_rotary(x: Lazy, heads: Heads, table: &RotaryTable, back: bool) -> Lazy {
        lazy(B::fused_rotary(now(x), heads, table, back))
    }

    fn fused_attention(qkv: Lazy, options: &AttentionOptions) -> (Lazy, Lazy) {
        let (out, lse) = B::fused_attention(now(qkv), options);
        (lazy(out), lazy(lse))
    }

    fn fused_attention_backward(
        qkv: Lazy,
        out: Lazy,
        lse: Lazy,
        options: &AttentionOptions,
        d_out: Lazy,
    ) -> Lazy {
        let [qkv, out, lse, d_out] = [qkv, out, lse, d_out].map(now);
        lazy(B::fused_attention_backward(qkv, out, lse, options, d_out))
    }

    fn fused_column_sums(x: Lazy) -> Lazy {
        lazy(B::fused_column_sums(now(x)))
    }

    fn fused_add_rows_at(table: Lazy, index: Lazy, dy: Lazy) -> Lazy {
        let index = index.client.clone().resolve_tensor_int::<B>(index);
        lazy(B::fused_add_rows_at(now(table), index, now(dy)))
    }

    fn fused_gather(sums: Lazy, parts: Vec<Part<Lazy>>) -> Lazy {
        let parts = parts.into_iter().map(|part| Part {
            tensor: now(part.tensor),
            start: part.start,
        });
        let parts = parts.collect();
        lazy(B::fused_gather(now(sums), parts))
    }

    fn fused_scatter(flat: Lazy, ranges: &[Range<usize>]) -> Vec<Lazy> {
        let parts = B::fused_scatter(now(flat), ranges).into_iter();
        parts.map(lazy).collect()
    }

    fn fused_adamw(
        state: [Lazy; 3],
        gradients: Lazy,
        factors: &AdamWFactors,
        decayed: &Ranges,
        dtype: DType,
    ) -> ([Lazy; 3], Lazy) {
        let (state, gradients) = (state.map(now), now(gradients));
        let (state, weights) = B::fused_adamw(state, gradients, factors, decayed, dtype);
        (state.map(lazy), lazy(weights))
    }

    fn fused_square_sum(x: Lazy) -> Lazy {
        lazy(B::fused_square_sum(now(x)))
    }

    fn fused_head_loss(
        hidden: Lazy,
        weight: Lazy,
        shard: &HeadShard<'_>,
        gradients: bool,
    ) -> HeadLoss<Self> {
        let loss = B::fused_head_loss(now(hidden), now(weight), shard, gradients);
        HeadLoss {
            losses: lazy(loss.losses),
            gradients: loss.gradients.map(|(x, w)| (lazy(x), lazy(w))),
        }
    }
}

/// Flat buffers and activations of a step go from one operation to the next so.
#[cfg(all(test, feature = "wgpu"))]
#[test]
fn what_nobody_else_holds_is_changed_in_place() {
    use burn::backend::ops::FloatTensorOps;
    let device = CubeDevice::Wgpu(Default::default());
    let made = || lazy(B::float_zeros([64].into(), &device, DType::F32.into()));
    assert!(now(made()).can_mut());
    let computed = Fusion::<B>::float_add_scalar(made(), 1.0.into());
    assert!(now(computed).can_mut());
    let held = made();
    let other = held.clone();
    assert!(!now(held).can_mut());
    drop(other);
    // So does a buffer that an operation has changed and given back.
    let sums = Fusion::<B>::fused_gather(made(), Vec::new());
    let sums = Fusion::<B>::fused_gather(sums, Vec::new());
    assert!(now(sums).can_mut());
}
