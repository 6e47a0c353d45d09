//! Layer normalisation and RMS normalisation: a cube takes a row, and reads it once each way. The weights' gradients
//! are summed in two stages, of runs of rows and of what they gave.

use super::sum::{cube_sum, finished};
use super::{
    Units, addresses, contiguous, cubes, elem, empty, empty_like, owned, reshaped, rows_of,
    vector_size,
};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// How a row lies over a cube's units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    /// Vectors in it.
    vectors: usize,
    /// Units of a cube.
    units: usize,
    planes: bool,
    /// Whether rows are centred: layer normalisation is, RMS normalisation is not.
    centred: bool,
}

impl Row {
    fn new(units: Units, vectors: usize, centred: bool) -> Self {
        Row {
            vectors,
            units: units.for_work(vectors.div_ceil(2), 1024),
            planes: units.planes,
            centred,
        }
    }

    fn vectors_of_unit(self) -> usize {
        self.vectors.div_ceil(self.units)
    }
}

/// The unit's vectors of a row that starts at `base`, zero beyond its end.
#[cube]
fn read_row<F: Float, N: Size>(
    x: &[Vector<F, N>],
    base: usize,
    #[comptime] row: Row,
) -> Array<Vector<f32, N>> {
    let mut values = Array::<Vector<f32, N>>::new(comptime!(row.vectors_of_unit()));
    #[unroll]
    for i in 0..comptime!(row.vectors_of_unit()) {
        let at = i * row.units + UNIT_POS as usize;
        values[i] = Vector::new(0.0f32);
        if at < row.vectors {
            values[i] = Vector::cast_from(x[base + at]);
        }
    }
    values
}

/// Normalises the unit's vectors of a row; `stats` gets the row's mean, if it is centred, and scale.
#[cube]
fn normalise<F: Float, N: Size>(
    values: &mut Array<Vector<f32, N>>,
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    stats: &mut [f32],
    epsilon: f32,
    at_row: usize,
    #[comptime] row: Row,
) {
    let unit = UNIT_POS as usize;
    let mut shared = Shared::<[f32]>::new_slice(row.units);
    let of_mean = 1.0f32 / f32::cast_from(comptime!(row.vectors) * N::value());
    let base = at_row * row.vectors;
    let mut mean = 0.0f32;
    if comptime!(row.centred) {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..comptime!(row.vectors_of_unit()) {
            sum += values[i];
        }
        mean = cube_sum(sum.vector_sum(), &mut shared, row.units, row.planes) * of_mean;
    }
    let mut squares = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..comptime!(row.vectors_of_unit()) {
        let at = i * row.units + unit;
        if comptime!(row.centred) {
            values[i] -= Vector::new(mean);
        }
        if at < row.vectors {
            squares += values[i] * values[i];
        }
    }
    let square = cube_sum(squares.vector_sum(), &mut shared, row.units, row.planes) * of_mean;
    let scale = 1.0f32 / (square + epsilon).sqrt();
    #[unroll]
    for i in 0..comptime!(row.vectors_of_unit()) {
        let at = i * row.units + unit;
        if at < row.vectors {
            let mut out = values[i] * Vector::new(scale) * Vector::cast_from(weight[at]);
            if comptime!(row.centred) {
                out += Vector::cast_from(bias[at]);
            }
            y[base + at] = Vector::cast_from(out);
        }
    }
    if unit == 0 {
        if comptime!(row.centred) {
            stats[2 * at_row] = mean;
            stats[2 * at_row + 1] = scale;
        } else {
            stats[at_row] = scale;
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn norm_forward<F: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    stats: &mut [f32],
    epsilon: f32,
    rows: usize,
    #[comptime] row: Row,
    #[define(F)] _dtype: ElemType,
) {
    let at_row = CUBE_POS;
    if at_row < rows {
        let mut values = read_row::<F, N>(x, at_row * row.vectors, row);
        normalise::<F, N>(&mut values, weight, bias, y, stats, epsilon, at_row, row);
    }
}

/// The sum is rounded to its type first: what the backward reads again.
#[cube(launch_unchecked, address_type = "dynamic")]
fn added_norm_forward<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    sums: &mut [Vector<F, N>],
    y: &mut [Vector<F, N>],
    stats: &mut [f32],
    epsilon: f32,
    rows: usize,
    #[comptime] row: Row,
    #[define(F)] _dtype: ElemType,
) {
    let at_row = CUBE_POS;
    if at_row < rows {
        let base = at_row * row.vectors;
        let mut values = read_row::<F, N>(x, base, row);
        #[unroll]
        for i in 0..comptime!(row.vectors_of_unit()) {
            let at = i * row.units + UNIT_POS as usize;
            if at < row.vectors {
                let more = Vector::<f32, N>::cast_from(residual[base + at]);
                let sum = Vector::<F, N>::cast_from(values[i] + more);
                sums[base + at] = sum;
                values[i] = Vector::cast_from(sum);
            }
        }
        normalise::<F, N>(&mut values, weight, bias, y, stats, epsilon, at_row, row);
    }
}

/// With `add` the input's gradient is added to what is in `dx`. A cube takes every so many rows; `partials
/// [1 or 2, cubes, width]` gets its sums of `dy ∘ x̂`, and of `dy`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn norm_backward<F: Float, N: Size>(
    x: &[Vector<F, N>],
    stats: &[f32],
    weight: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    partials: &mut [Vector<f32, N>],
    rows: usize,
    parts: usize,
    #[comptime] add: bool,
    #[comptime] row: Row,
    #[define(F)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let mut shared = Shared::<[f32]>::new_slice(row.units);
    let of_mean = 1.0f32 / f32::cast_from(comptime!(row.vectors) * N::value());
    let mut d_weight = Array::<Vector<f32, N>>::new(comptime!(row.vectors_of_unit()));
    let mut d_bias = Array::<Vector<f32, N>>::new(comptime!(row.vectors_of_unit()));
    #[unroll]
    for i in 0..comptime!(row.vectors_of_unit()) {
        d_weight[i] = Vector::new(0.0f32);
        d_bias[i] = Vector::new(0.0f32);
    }
    let mut at_row = CUBE_POS_X as usize;
    while at_row < rows {
        let base = at_row * row.vectors;
        let mut mean = 0.0f32;
        let mut at_scale = at_row;
        if comptime!(row.centred) {
            mean = stats[2 * at_row];
            at_scale = 2 * at_row + 1;
        }
        let scale = stats[at_scale];
        let mut normal = read_row::<F, N>(x, base, row);
        let mut g = read_row::<F, N>(dy, base, row);
        let mut sums = Vector::<f32, N>::new(0.0f32);
        let mut products = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..comptime!(row.vectors_of_unit()) {
            let at = i * row.units + unit;
            if at < row.vectors {
                normal[i] = (normal[i] - Vector::new(mean)) * Vector::new(scale);
                d_weight[i] += g[i] * normal[i];
                d_bias[i] += g[i];
                g[i] *= Vector::cast_from(weight[at]);
                sums += g[i];
                products += g[i] * normal[i];
            }
        }
        let along = cube_sum(products.vector_sum(), &mut shared, row.units, row.planes) * of_mean;
        let mut g_mean = 0.0f32;
        if comptime!(row.centred) {
            g_mean = cube_sum(sums.vector_sum(), &mut shared, row.units, row.planes) * of_mean;
        }
        #[unroll]
        for i in 0..comptime!(row.vectors_of_unit()) {
            let at = i * row.units + unit;
            if at < row.vectors {
                let rest = g[i] - Vector::new(g_mean) - normal[i] * Vector::new(along);
                let mut own = rest * Vector::new(scale);
                if comptime!(add) {
                    own += Vector::cast_from(dx[base + at]);
                }
                dx[base + at] = Vector::cast_from(own);
            }
        }
        at_row += parts;
    }
    let part = CUBE_POS_X as usize;
    #[unroll]
    for i in 0..comptime!(row.vectors_of_unit()) {
        let at = i * row.units + unit;
        if at < row.vectors {
            partials[part * row.vectors + at] = d_weight[i];
            if comptime!(row.centred) {
                partials[(parts + part) * row.vectors + at] = d_bias[i];
            }
        }
    }
}

fn forward(
    x: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    epsilon: f32,
) -> (CubeTensor, CubeTensor) {
    let (x, weight) = (contiguous(x), contiguous(weight));
    let centred = bias.is_some();
    // Of a kernel that has no bias, nothing reads it.
    let bias = bias.map_or_else(|| weight.clone(), contiguous);
    let (rows, n) = rows_of(&x);
    let (y, stats) = (
        empty_like(&x),
        empty(&x, [rows, 1 + usize::from(centred)], DType::F32),
    );
    let client = x.client.clone();
    let vector = vector_size(&x, &[n]);
    let row = Row::new(Units::of(&client), n / vector, centred);
    // SAFETY: the kernel reads and writes `rows` rows of `n`, and one of the statistics for each.
    unsafe {
        norm_forward::launch_unchecked(
            &client,
            cubes(&client, rows),
            CubeDim::new_1d(row.units as u32),
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            weight.into_buffer_arg(),
            bias.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            stats.clone().into_buffer_arg(),
            epsilon,
            rows,
            row,
            elem(&x),
        );
    }
    (y, stats)
}

/// The sum, its norm (centred with a bias, of root mean squares without) and the norm's statistics.
pub fn added_norm(
    x: CubeTensor,
    residual: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    epsilon: f32,
) -> [CubeTensor; 3] {
    let (x, residual, weight) = (contiguous(x), contiguous(residual), contiguous(weight));
    let centred = bias.is_some();
    let bias = bias.map_or_else(|| weight.clone(), contiguous);
    let (rows, n) = rows_of(&x);
    let (sums, y) = (empty_like(&x), empty_like(&x));
    let stats = empty(&x, [rows, 1 + usize::from(centred)], DType::F32);
    let client = x.client.clone();
    let vector = vector_size(&x, &[n]);
    let row = Row::new(Units::of(&client), n / vector, centred);
    // SAFETY: the kernel reads and writes `rows` rows of `n`, and one of the statistics for each.
    unsafe {
        added_norm_forward::launch_unchecked(
            &client,
            cubes(&client, rows),
            CubeDim::new_1d(row.units as u32),
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            residual.into_buffer_arg(),
            weight.into_buffer_arg(),
            bias.into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            y.clone().into_buffer_arg(),
            stats.clone().into_buffer_arg(),
            epsilon,
            rows,
            row,
            elem(&x),
        );
    }
    [sums, y, stats]
}

/// Cubes of a backward: as many as keep a large device busy, the same on every one.
const PARTS: usize = 512;

/// The input's gradient, and `[1 or 2, n]` of weight and bias.
fn backward(
    x: CubeTensor,
    stats: CubeTensor,
    weight: CubeTensor,
    dy: CubeTensor,
    so_far: Option<CubeTensor>,
    centred: bool,
) -> (CubeTensor, CubeTensor) {
    let (x, stats) = (contiguous(x), contiguous(stats));
    let (weight, dy) = (contiguous(weight), contiguous(dy));
    let (rows, n) = rows_of(&x);
    let parts = rows.clamp(1, PARTS);
    let add = so_far.is_some();
    let dx = so_far.map_or_else(|| empty_like(&x), owned);
    let partials = empty(&x, [1 + usize::from(centred), parts, n], DType::F32);
    let client = x.client.clone();
    // Partial sums are in f32, whose vectors have four values at most.
    let vector = vector_size(&x, &[n]).min(4);
    let row = Row::new(Units::of(&client), n / vector, centred);
    // SAFETY: the kernel reads and writes `rows` rows of `n`, and `parts` of partial sums.
    unsafe {
        norm_backward::launch_unchecked(
            &client,
            CubeCount::Static(parts as u32, 1, 1),
            CubeDim::new_1d(row.units as u32),
            addresses(&[&x]),
            vector,
            x.clone().into_buffer_arg(),
            stats.into_buffer_arg(),
            weight.clone().into_buffer_arg(),
            dy.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            partials.clone().into_buffer_arg(),
            rows,
            parts,
            add,
            row,
            elem(&x),
        );
    }
    (dx, finished(partials, weight.dtype))
}

pub fn layer_norm(
    x: CubeTensor,
    weight: CubeTensor,
    bias: CubeTensor,
    epsilon: f32,
) -> (CubeTensor, CubeTensor) {
    forward(x, weight, Some(bias), epsilon)
}

pub fn layer_norm_backward(
    x: CubeTensor,
    stats: CubeTensor,
    weight: CubeTensor,
    dy: CubeTensor,
    so_far: Option<CubeTensor>,
) -> [CubeTensor; 3] {
    let n = rows_of(&x).1;
    let (dx, sums) = backward(x, stats, weight, dy, so_far, true);
    [dx, super::row(&sums, 0, n), super::row(&sums, 1, n)]
}

pub fn rms_norm(x: CubeTensor, weight: CubeTensor, epsilon: f32) -> (CubeTensor, CubeTensor) {
    forward(x, weight, None, epsilon)
}

pub fn rms_norm_backward(
    x: CubeTensor,
    scale: CubeTensor,
    weight: CubeTensor,
    dy: CubeTensor,
    so_far: Option<CubeTensor>,
) -> [CubeTensor; 2] {
    let n = rows_of(&x).1;
    let (dx, sums) = backward(x, scale, weight, dy, so_far, false);
    [dx, reshaped(sums, [n])]
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::catalog::Entry>) {
    use super::catalog::{Entry, TYPES, buffer as b, settings};
    const WIDTH: usize = 4096;
    let units = Units {
        most: 1024,
        planes: true,
    };
    for (name, dtype, load) in TYPES {
        for (kind, centred) in [("layer_norm", true), ("rms_norm", false)] {
            let row = Row::new(units, WIDTH / load, centred);
            all.push(Entry::new(format!("{kind}_forward {name}"), 64, move |t| {
                let dim = settings(CubeDim::new_1d(row.units as u32));
                let (device, properties) = (t.device, t.properties);
                Box::new(norm_forward::NormForward::new(
                    dim,
                    device,
                    properties,
                    b(),
                    b(),
                    b(),
                    b(),
                    b(),
                    (),
                    (),
                    load,
                    row,
                    dtype,
                ))
            }));
            all.push(Entry::new(
                format!("added_{kind}_forward {name}"),
                64,
                move |t| {
                    let dim = settings(CubeDim::new_1d(row.units as u32));
                    let (device, properties) = (t.device, t.properties);
                    Box::new(added_norm_forward::AddedNormForward::new(
                        dim,
                        device,
                        properties,
                        b(),
                        b(),
                        b(),
                        b(),
                        b(),
                        b(),
                        b(),
                        (),
                        (),
                        load,
                        row,
                        dtype,
                    ))
                },
            ));
            let load = load.min(4);
            let row = Row::new(units, WIDTH / load, centred);
            for (added, add) in [("", false), ("added_", true)] {
                all.push(Entry::new(
                    format!("{added}{kind}_backward {name}"),
                    128,
                    move |t| {
                        let dim = settings(CubeDim::new_1d(row.units as u32));
                        let (device, properties) = (t.device, t.properties);
                        Box::new(norm_backward::NormBackward::new(
                            dim,
                            device,
                            properties,
                            b(),
                            b(),
                            b(),
                            b(),
                            b(),
                            b(),
                            (),
                            (),
                            load,
                            add,
                            row,
                            dtype,
                        ))
                    },
                ));
            }
        }
    }
}
