//! Passes over flat buffers: AdamW, and the sum of squares that a norm is made of.

use super::sum::{cube_sum, finished};
use super::{
    UNITS, Units, addresses, contiguous, elem, empty, owned, reshaped, unit_each, vector_size,
};
use crate::adamw::AdamWFactors;
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// [`AdamWFactors`] on a device.
#[derive(CubeType, CubeLaunch, Clone)]
struct Factors {
    grad_scale: f32,
    beta1: f32,
    beta1_rest: f32,
    beta2: f32,
    beta2_rest: f32,
    step_size: f32,
    second_correction: f32,
    eps: f32,
    keep: f32,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn adamw_step<F: Float, N: Size>(
    values: &mut [Vector<f32, N>],
    first: &mut [Vector<f32, N>],
    second: &mut [Vector<f32, N>],
    gradients: &[Vector<f32, N>],
    weights: &mut [Vector<F, N>],
    f: &Factors,
    vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        let at = ABSOLUTE_POS;
        let g = gradients[at] * Vector::new(f.grad_scale);
        let m = first[at] * Vector::new(f.beta1) + g * Vector::new(f.beta1_rest);
        let v = second[at] * Vector::new(f.beta2) + g * g * Vector::new(f.beta2_rest);
        let denominator = v.sqrt() / Vector::new(f.second_correction) + Vector::new(f.eps);
        let step = m / denominator * Vector::new(f.step_size);
        let value = values[at] * Vector::new(f.keep) - step;
        first[at] = m;
        second[at] = v;
        values[at] = value;
        weights[at] = Vector::cast_from(value);
    }
}

/// Sums of squares of what each of `parts` cubes takes.
#[cube(launch_unchecked, address_type = "dynamic")]
fn square_partials<F: Float, N: Size>(
    x: &[Vector<F, N>],
    partials: &mut [f32],
    vectors: usize,
    parts: usize,
    #[comptime] units: usize,
    #[comptime] planes: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(units);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut at = CUBE_POS_X as usize * units + UNIT_POS as usize;
    while at < vectors {
        let value = Vector::<f32, N>::cast_from(x[at]);
        sum += value * value;
        at += parts * units;
    }
    let total = cube_sum(sum.vector_sum(), &mut shared, units, planes);
    if UNIT_POS == 0 {
        partials[CUBE_POS_X as usize] = total;
    }
}

/// In place where nobody else holds the buffers.
pub fn adamw(
    state: [CubeTensor; 3],
    gradients: CubeTensor,
    f: &AdamWFactors,
    dtype: DType,
) -> ([CubeTensor; 3], CubeTensor) {
    let [values, first, second] = state.map(owned);
    let gradients = contiguous(gradients);
    let len = values.shape().num_elements();
    let weights = empty(&values, values.shape(), dtype);
    let vector = vector_size(&values, &[len]);
    let vectors = len / vector;
    let (count, dim) = unit_each(&values.client, vectors);
    let factors = FactorsLaunch::new(
        f.grad_scale,
        f.beta1[0],
        f.beta1[1],
        f.beta2[0],
        f.beta2[1],
        f.step_size,
        f.second_correction,
        f.eps,
        f.keep,
    );
    // SAFETY: each unit reads and writes one vector of every buffer; all have as many.
    unsafe {
        adamw_step::launch_unchecked(
            &values.client,
            count,
            dim,
            addresses(&[&values]),
            vector,
            values.clone().into_buffer_arg(),
            first.clone().into_buffer_arg(),
            second.clone().into_buffer_arg(),
            gradients.into_buffer_arg(),
            weights.clone().into_buffer_arg(),
            factors,
            vectors,
            elem(&weights),
        );
    }
    ([values, first, second], weights)
}

/// `Σ x²`, `[1]` in f32, added up in the same order on every device.
pub fn square_sum(x: CubeTensor) -> CubeTensor {
    let x = contiguous(x);
    let len = x.shape().num_elements();
    let vector = vector_size(&x, &[len]);
    let vectors = len / vector;
    let on = Units::of(&x.client);
    let units = on.for_work(UNITS, UNITS);
    let parts = vectors.div_ceil(UNITS).clamp(1, 512);
    let partials = empty(&x, [1, parts, 1], DType::F32);
    // SAFETY: the kernel reads `vectors` vectors and writes `parts` sums.
    unsafe {
        square_partials::launch_unchecked(
            &x.client,
            CubeCount::Static(parts as u32, 1, 1),
            CubeDim::new_1d(units as u32),
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            partials.clone().into_buffer_arg(),
            vectors,
            parts,
            units,
            on.planes,
            elem(&x),
        );
    }
    reshaped(finished(partials, DType::F32), [1])
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::catalog::Entry>) {
    use super::catalog::{Entry, TYPES, buffer as b, settings};
    for (name, dtype, load) in TYPES {
        all.push(Entry::new(format!("adamw {name}"), 64, move |t| {
            let factors = FactorsCompilationArg {
                grad_scale: (),
                beta1: (),
                beta1_rest: (),
                beta2: (),
                beta2_rest: (),
                step_size: (),
                second_correction: (),
                eps: (),
                keep: (),
            };
            let dim = settings(CubeDim::new_1d(UNITS as u32));
            let (device, properties) = (t.device, t.properties);
            Box::new(adamw_step::AdamwStep::new(
                dim,
                device,
                properties,
                b(),
                b(),
                b(),
                b(),
                b(),
                factors,
                (),
                4,
                dtype,
            ))
        }));
        all.push(Entry::new(format!("square_sum {name}"), 64, move |t| {
            let dim = settings(CubeDim::new_1d(UNITS as u32));
            let (device, properties) = (t.device, t.properties);
            Box::new(square_partials::SquarePartials::new(
                dim,
                device,
                properties,
                b(),
                b(),
                (),
                (),
                load,
                UNITS,
                true,
                dtype,
            ))
        }));
    }
}
