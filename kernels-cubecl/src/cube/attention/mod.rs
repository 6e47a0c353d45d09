//! Causal attention on packed queries, keys and values, flash style (Dao et al. 2022; Dao 2023): a tile of scores exists
//! at a time, the forward keeps the log-sum-exp of every row, and the backward makes the probabilities again from it.
//!
//! The backward is two kernels, one over blocks of keys and one over blocks of queries: each writes its gradients
//! once, in an order that does not change, where one kernel would have to add to the queries' atomically. The price
//! is seven products in the place of five.

mod delta;
#[cfg(all(test, feature = "ptx"))]
mod emulated;
mod mma;
mod simple;
mod tensor;

use super::{addresses, contiguous, empty, empty_like};
use crate::attention::AttentionOptions;
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Sizes of a launch: `s` positions, `n` groups of `r` query heads.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sizes {
    s: usize,
    n: usize,
    r: usize,
}

/// Where a head lies in `[s, n, (r + 2) d]`, or in `[s, n, r d]`: its first element, and from one position to the next.
#[derive(CubeType, Clone, Copy)]
pub struct Place {
    start: usize,
    stride: usize,
}

#[cube]
impl Place {
    /// Part of a group of packed queries, keys and values: its query heads, the key, the value.
    fn packed(sizes: &Sizes, group: usize, part: usize, #[comptime] d: usize) -> Place {
        Place {
            start: (group * (sizes.r + 2) + part) * d,
            stride: sizes.n * (sizes.r + 2) * d,
        }
    }

    fn output(sizes: &Sizes, group: usize, head: usize, #[comptime] d: usize) -> Place {
        Place {
            start: (group * sizes.r + head) * d,
            stride: sizes.n * sizes.r * d,
        }
    }
}

/// A launch's tensors and numbers.
struct Call<'a> {
    qkv: CubeTensor,
    options: &'a AttentionOptions,
    s: usize,
    n: usize,
}

impl<'a> Call<'a> {
    fn new(qkv: CubeTensor, options: &'a AttentionOptions) -> Self {
        let qkv = contiguous(qkv);
        let [s, n, width] = qkv.shape().dims();
        let (r, d) = (options.queries_per_group, options.head_width);
        assert_eq!(
            width,
            (r + 2) * d,
            "queries, a key and a value in each group"
        );
        Call { qkv, options, s, n }
    }

    fn r(&self) -> usize {
        self.options.queries_per_group
    }

    fn d(&self) -> usize {
        self.options.head_width
    }

    fn heads(&self) -> usize {
        self.n * self.r()
    }

    fn sizes(&self) -> SizesLaunch {
        SizesLaunch::new(self.s, self.n, self.r())
    }

    fn scale(&self) -> f32 {
        self.options.scale as f32
    }

    fn addresses(&self) -> AddressType {
        addresses(&[&self.qkv])
    }
}

pub fn forward(qkv: CubeTensor, options: &AttentionOptions) -> (CubeTensor, CubeTensor) {
    let call = Call::new(qkv, options);
    let qkv = &call.qkv;
    let out = empty(qkv, [call.s, call.n, call.r() * call.d()], qkv.dtype);
    let lse = empty(qkv, [call.heads(), call.s], DType::F32);
    match tensor::serves(&call) {
        true => tensor::forward(&call, &out, &lse),
        false => simple::forward(&call, &out, &lse),
    }
    (out, lse)
}

pub fn backward(
    qkv: CubeTensor,
    out: CubeTensor,
    lse: CubeTensor,
    options: &AttentionOptions,
    d_out: CubeTensor,
) -> CubeTensor {
    let call = Call::new(qkv, options);
    let (out, lse, d_out) = (contiguous(out), contiguous(lse), contiguous(d_out));
    let d_qkv = empty_like(&call.qkv);
    let delta = empty(&lse, lse.shape(), DType::F32);
    delta::delta(&call, &out, &d_out, &delta);
    match tensor::serves(&call) {
        true => tensor::backward(&call, &lse, &delta, &d_out, &d_qkv),
        false => simple::backward(&call, &lse, &delta, &d_out, &d_qkv),
    }
    d_qkv
}

#[cfg(feature = "ptx")]
impl SizesCompilationArg {
    fn any() -> Self {
        SizesCompilationArg {
            s: (),
            n: (),
            r: (),
        }
    }
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::catalog::Entry>) {
    delta::catalog(all);
    simple::catalog(all);
    tensor::catalog(all);
}
