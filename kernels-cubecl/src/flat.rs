//! Flat buffers on a device: the parameters of a model, or their gradients, one after another in one tensor, so that a
//! step takes a few launches however many parameters there are.

use crate::adamw::AdamWFactors;
use crate::{Fused, from_dispatch, into_dispatch};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, DispatchDevice, DispatchKindConversion, DispatchTensor, Flex, TensorMetadata,
};
use burn::tensor::{DType, Device, Slice, Tensor};
use std::ops::Range;

/// A tensor of a flat buffer.
#[derive(Debug, Clone)]
pub struct Part<T> {
    /// `[n]`
    pub tensor: T,
    /// Its first element's place in the buffer.
    pub start: usize,
}

/// Elements of a flat buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range<usize>>);

impl Ranges {
    /// Those of `ranges`, which ascend.
    ///
    /// # Panics
    /// If they do not.
    pub fn ascending(ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut all: Vec<Range<usize>> = Vec::new();
        for range in ranges.into_iter().filter(|range| !range.is_empty()) {
            match all.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                last => {
                    assert!(last.is_none_or(|last| last.end < range.start), "{range:?}");
                    all.push(range);
                }
            }
        }
        Ranges(all)
    }

    /// As few ranges as there may be.
    pub fn iter(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.iter().cloned()
    }

    /// All of `0..len` in runs that lie inside or outside, and which of both.
    pub fn runs(&self, len: usize) -> impl Iterator<Item = (Range<usize>, bool)> {
        let cuts = std::iter::once(0).chain(self.bounds());
        let ends = self.bounds().chain([len]);
        let runs = cuts.zip(ends).map(move |(start, end)| start..end.min(len));
        let inside = [false, true].into_iter().cycle();
        runs.zip(inside).filter(|(run, _)| !run.is_empty())
    }

    /// Where they begin and end, in turn.
    pub fn bounds(&self) -> impl Iterator<Item = usize> {
        self.0.iter().flat_map(|range| [range.start, range.end])
    }
}

/// Runs a function of a backend on tensors' own.
macro_rules! on_backend {
    ($device:expr, $run:ident($($argument:expr),*)) => {
        match $device.as_dispatch() {
            DispatchDevice::Flex(_) => $run::<Flex>($($argument),*),
            #[cfg(any(feature = "cuda", feature = "wgpu", feature = "cpu"))]
            DispatchDevice::Cube(_) => $run::<burn::backend::Cube>($($argument),*),
            other => panic!("flat buffers lie on Flex's device or on CubeCL's, not on {other:?}"),
        }
    };
}

/// Whether tensors of that device lie in the host's memory.
pub fn is_host(device: &Device) -> bool {
    matches!(
        device.clone().inner().as_dispatch(),
        DispatchDevice::Flex(_)
    )
}

/// Adds each part, of any float type, to its elements of `sums [n]` in f32; in place where nobody else holds them.
///
/// # Panics
/// If a part does not lie inside, or a tensor has a graph.
pub fn gather(sums: Tensor<1>, parts: Vec<Part<Tensor<1>>>) -> Tensor<1> {
    fn run<B: Fused>(sums: Tensor<1>, parts: Vec<Part<Tensor<1>>>) -> Tensor<1>
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        let parts = parts.into_iter().map(|part| Part {
            tensor: primitive::<B>(part.tensor),
            start: part.start,
        });
        tensor::<B>(B::fused_gather(primitive::<B>(sums), parts.collect()))
    }
    let len = sums.dims()[0];
    for part in &parts {
        let end = part.start + part.tensor.dims()[0];
        assert!(end <= len, "a part ends at {end} of {len} elements");
    }
    on_backend!(sums.device(), run(sums, parts))
}

/// The elements of `flat [n]` in each of the ranges, as tensors of the same type.
///
/// # Panics
/// If a range does not lie inside, or the tensor has a graph.
pub fn scatter(flat: Tensor<1>, ranges: &[Range<usize>]) -> Vec<Tensor<1>> {
    fn run<B: Fused>(flat: Tensor<1>, ranges: &[Range<usize>]) -> Vec<Tensor<1>>
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        let parts = B::fused_scatter(primitive::<B>(flat), ranges).into_iter();
        parts.map(tensor::<B>).collect()
    }
    let len = flat.dims()[0];
    for range in ranges {
        assert!(range.end <= len, "{range:?} of {len} elements");
    }
    on_backend!(flat.device(), run(flat, ranges))
}

/// A step of AdamW on weights and both moments, `[n]` of f32 each, in place where nobody else holds them; weights decay in
/// the ranges alone. Returns the weights rounded to `dtype` as well.
pub fn adamw(
    state: [Tensor<1>; 3],
    gradients: Tensor<1>,
    factors: &AdamWFactors,
    decayed: &Ranges,
    dtype: DType,
) -> ([Tensor<1>; 3], Tensor<1>) {
    fn run<B: Fused>(
        state: [Tensor<1>; 3],
        gradients: Tensor<1>,
        factors: &AdamWFactors,
        decayed: &Ranges,
        dtype: DType,
    ) -> ([Tensor<1>; 3], Tensor<1>)
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        let (state, gradients) = (state.map(primitive::<B>), primitive::<B>(gradients));
        let (state, weights) = B::fused_adamw(state, gradients, factors, decayed, dtype);
        (state.map(tensor::<B>), tensor::<B>(weights))
    }
    let device = gradients.device();
    on_backend!(device, run(state, gradients, factors, decayed, dtype))
}

/// `Σ x²` of `x [n]`, `[1]` in f32.
pub fn square_sum(x: Tensor<1>) -> Tensor<1> {
    fn run<B: Fused>(x: Tensor<1>) -> Tensor<1>
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        tensor::<B>(B::fused_square_sum(primitive::<B>(x)))
    }
    on_backend!(x.device(), run(x))
}

fn primitive<B: Backend>(x: Tensor<1>) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    from_dispatch::<B>(x.into_dispatch())
}

fn tensor<B: Backend>(x: FloatTensor<B>) -> Tensor<1>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    Tensor::from_dispatch(into_dispatch::<B>(x))
}

/// In primitives.
pub(crate) fn gather_reference<B: Backend>(
    mut sums: FloatTensor<B>,
    parts: Vec<Part<FloatTensor<B>>>,
) -> FloatTensor<B> {
    for Part { tensor, start } in parts {
        let slice = [Slice::from(start..start + tensor.shape().num_elements())];
        let part = B::float_cast(tensor, sums.dtype().into());
        let sum = B::float_add(B::float_slice(sums.clone(), &slice), part);
        sums = B::float_slice_assign(sums, &slice, sum);
    }
    sums
}

/// In primitives.
pub(crate) fn scatter_reference<B: Backend>(
    flat: FloatTensor<B>,
    ranges: &[Range<usize>],
) -> Vec<FloatTensor<B>> {
    let part = |range: &Range<usize>| B::float_slice(flat.clone(), &[Slice::from(range.clone())]);
    ranges.iter().map(part).collect()
}
