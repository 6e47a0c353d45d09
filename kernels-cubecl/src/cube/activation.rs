//! GELU with its bias, and SwiGLU.

use super::sum::{Strips, finished, parts_of, write_strip};
use super::{
    Units, addresses, contiguous, elem, empty, empty_like, reshaped, rows_of, unit_each,
    vector_size,
};
use crate::gelu::GeluApproximation;
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// 2√(2/π)
const SLOPE: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;
const FRAC_1_SQRT_2: f32 = std::f32::consts::FRAC_1_SQRT_2;
/// 1/√(2π)
const DENSITY: f32 = 0.398_942_3;

#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::new(1.0f32);
    one / (one + (Vector::new(0.0f32) - x).exp())
}

/// What GELU multiplies `x` by.
#[cube]
fn gate<N: Size>(x: Vector<f32, N>, #[comptime] tanh: bool) -> Vector<f32, N> {
    if comptime!(tanh) {
        let slope = Vector::new(SLOPE) + Vector::new(comptime!(SLOPE * CUBIC)) * x * x;
        sigmoid::<N>(x * slope)
    } else {
        let half = Vector::new(0.5f32);
        half + half * (x * Vector::new(FRAC_1_SQRT_2)).erf()
    }
}

/// GELU's derivative.
#[cube]
fn slope<N: Size>(x: Vector<f32, N>, #[comptime] tanh: bool) -> Vector<f32, N> {
    let gate = gate::<N>(x, tanh);
    let of_gate = if comptime!(tanh) {
        let steep = Vector::new(SLOPE) + Vector::new(comptime!(3.0 * SLOPE * CUBIC)) * x * x;
        gate * (Vector::new(1.0f32) - gate) * steep
    } else {
        Vector::new(DENSITY) * (x * x * Vector::new(-0.5f32)).exp()
    };
    gate + x * of_gate
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gelu_forward<F: Float, N: Size>(
    x: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    vectors: usize,
    width: usize,
    #[comptime] biased: bool,
    #[comptime] tanh: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        let mut v = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
        if comptime!(biased) {
            v += Vector::cast_from(bias[ABSOLUTE_POS % width]);
        }
        y[ABSOLUTE_POS] = Vector::cast_from(v * gate::<N>(v, tanh));
    }
}

/// A strip of columns over a run of rows: `dx`, and the run's sums of it where there is a bias.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gelu_backward_strip<F: Float, N: Size>(
    x: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    partials: &mut [Vector<f32, N>],
    rows: usize,
    width: usize,
    rows_of_part: usize,
    #[comptime] strips: Strips,
    #[comptime] biased: bool,
    #[comptime] tanh: bool,
    #[define(F)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * strips.across + unit % strips.across;
    let part = CUBE_POS_Y as usize;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let end = min(rows, (part + 1) * rows_of_part);
    if column < width {
        let mut shift = Vector::<f32, N>::new(0.0f32);
        if comptime!(biased) {
            shift = Vector::cast_from(bias[column]);
        }
        let mut row = part * rows_of_part + unit / strips.across;
        while row < end {
            let at = row * width + column;
            let v = Vector::<f32, N>::cast_from(x[at]) + shift;
            let d = Vector::<f32, N>::cast_from(dy[at]) * slope::<N>(v, tanh);
            dx[at] = Vector::cast_from(d);
            sum += d;
            row += strips.down;
        }
    }
    if comptime!(biased) {
        let mut shared =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(strips.across * strips.down));
        write_strip(sum, partials, &mut shared, column, width, part, strips);
    }
}

/// `[rows, 2 width]`, gates before what they open, to `[rows, width]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn swiglu_forward<F: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    vectors: usize,
    width: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        let at = ABSOLUTE_POS / width * width + ABSOLUTE_POS;
        let gate = Vector::<f32, N>::cast_from(x[at]);
        let up = Vector::<f32, N>::cast_from(x[at + width]);
        y[ABSOLUTE_POS] = Vector::cast_from(gate * sigmoid::<N>(gate) * up);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn swiglu_backward_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    vectors: usize,
    width: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        let at = ABSOLUTE_POS / width * width + ABSOLUTE_POS;
        let gate = Vector::<f32, N>::cast_from(x[at]);
        let up = Vector::<f32, N>::cast_from(x[at + width]);
        let d = Vector::<f32, N>::cast_from(dy[ABSOLUTE_POS]);
        let open = sigmoid::<N>(gate);
        let one = Vector::new(1.0f32);
        dx[at] = Vector::cast_from(d * up * open * (one + gate * (one - open)));
        dx[at + width] = Vector::cast_from(d * gate * open);
    }
}

pub fn gelu(x: CubeTensor, bias: Option<CubeTensor>, how: GeluApproximation) -> CubeTensor {
    let x = contiguous(x);
    let biased = bias.is_some();
    // Of a kernel that has no bias, nothing reads it.
    let bias = bias.map_or_else(|| x.clone(), contiguous);
    let (y, (rows, n)) = (empty_like(&x), rows_of(&x));
    let vector = vector_size(&x, &[n]);
    let vectors = rows * n / vector;
    let (count, dim) = unit_each(&x.client, vectors);
    // SAFETY: the kernel reads and writes `vectors` vectors, and reads one row of the bias.
    unsafe {
        gelu_forward::launch_unchecked(
            &x.client,
            count,
            dim,
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            bias.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            vectors,
            n / vector,
            biased,
            how == GeluApproximation::Tanh,
            elem(&x),
        );
    }
    y
}

pub fn gelu_backward(
    x: CubeTensor,
    bias: Option<CubeTensor>,
    how: GeluApproximation,
    dy: CubeTensor,
) -> (CubeTensor, Option<CubeTensor>) {
    let (x, dy) = (contiguous(x), contiguous(dy));
    let biased = bias.is_some();
    let bias = bias.map_or_else(|| x.clone(), contiguous);
    let (dx, (rows, n)) = (empty_like(&x), rows_of(&x));
    let parts = parts_of(rows);
    let partials = match biased {
        true => empty(&x, [1, parts, n], DType::F32),
        // As long as a vector: nothing is written.
        false => empty(&x, [1, 1, 4], DType::F32),
    };
    // Partial sums are in f32, whose vectors have four values at most.
    let vector = vector_size(&x, &[n]).min(4);
    let width = n / vector;
    let strips = Strips::of(Units::of(&x.client));
    // SAFETY: the kernel reads and writes `rows` rows of `n`, and `parts` of them where there is a bias.
    unsafe {
        gelu_backward_strip::launch_unchecked(
            &x.client,
            CubeCount::Static(width.div_ceil(strips.across) as u32, parts as u32, 1),
            strips.cube_dim(),
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            bias.into_buffer_arg(),
            dy.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            partials.clone().into_buffer_arg(),
            rows,
            width,
            rows.div_ceil(parts),
            strips,
            biased,
            how == GeluApproximation::Tanh,
            elem(&x),
        );
    }
    let d_bias = biased.then(|| reshaped(finished(partials, x.dtype), [n]));
    (dx, d_bias)
}

pub fn swiglu(x: CubeTensor) -> CubeTensor {
    let x = contiguous(x);
    let ((rows, n), mut shape) = (rows_of(&x), x.shape());
    let (f, last) = (n / 2, shape.num_dims() - 1);
    shape[last] = f;
    let y = empty(&x, shape, x.dtype);
    let vector = vector_size(&x, &[f]);
    let vectors = rows * f / vector;
    let (count, dim) = unit_each(&x.client, vectors);
    // SAFETY: the kernel writes `vectors` vectors, and reads twice as many.
    unsafe {
        swiglu_forward::launch_unchecked(
            &x.client,
            count,
            dim,
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            y.clone().into_buffer_arg(),
            vectors,
            f / vector,
            elem(&x),
        );
    }
    y
}

pub fn swiglu_backward(x: CubeTensor, dy: CubeTensor) -> CubeTensor {
    let (x, dy) = (contiguous(x), contiguous(dy));
    let ((rows, n), dx) = (rows_of(&x), empty_like(&x));
    let f = n / 2;
    let vector = vector_size(&x, &[f]);
    let vectors = rows * f / vector;
    let (count, dim) = unit_each(&x.client, vectors);
    // SAFETY: the kernel reads `vectors` vectors of the gradient, and as many twice of input and output.
    unsafe {
        swiglu_backward_kernel::launch_unchecked(
            &x.client,
            count,
            dim,
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            dy.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            vectors,
            f / vector,
            elem(&x),
        );
    }
    dx
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::catalog::Entry>) {
    use super::UNITS;
    use super::catalog::{Entry, TYPES, buffer as b, settings};
    let strips = Strips::of(Units {
        most: 1024,
        planes: true,
    });
    for (name, dtype, load) in TYPES {
        for (kind, tanh) in [("gelu_tanh", true), ("gelu_erf", false)] {
            all.push(Entry::new(
                format!("bias_{kind}_forward {name}"),
                64,
                move |t| {
                    Box::new(gelu_forward::GeluForward::new(
                        settings(CubeDim::new_1d(UNITS as u32)),
                        t.device,
                        t.properties,
                        b(),
                        b(),
                        b(),
                        (),
                        (),
                        load,
                        true,
                        tanh,
                        dtype,
                    ))
                },
            ));
            let load = load.min(4);
            all.push(Entry::new(
                format!("bias_{kind}_backward {name}"),
                96,
                move |t| {
                    Box::new(gelu_backward_strip::GeluBackwardStrip::new(
                        settings(strips.cube_dim()),
                        t.device,
                        t.properties,
                        b(),
                        b(),
                        b(),
                        b(),
                        b(),
                        (),
                        (),
                        (),
                        load,
                        strips,
                        true,
                        tanh,
                        dtype,
                    ))
                },
            ));
        }
        all.push(Entry::new(format!("swiglu_forward {name}"), 64, move |t| {
            Box::new(swiglu_forward::SwigluForward::new(
                settings(CubeDim::new_1d(UNITS as u32)),
                t.device,
                t.properties,
                b(),
                b(),
                (),
                (),
                load,
                dtype,
            ))
        }));
        all.push(Entry::new(
            format!("swiglu_backward {name}"),
            96,
            move |t| {
                Box::new(swiglu_backward_kernel::SwigluBackwardKernel::new(
                    settings(CubeDim::new_1d(UNITS as u32)),
                    t.device,
                    t.properties,
                    b(),
                    b(),
                    b(),
                    (),
                    (),
                    load,
                    dtype,
                ))
            },
        ));
    }
}
