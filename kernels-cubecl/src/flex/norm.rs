//! Normalisation over the last dimension: one pass over a row's memory each way.

use super::simd::{sum, sum2, vectors};
use super::{Unwritten, Values, rows_at_once, rows_of, shape_of, tensor, written};
use burn::tensor::Shape;
use burn_flex::FlexTensor;
use rayon::prelude::*;

vectors! {
    /// Rows of `x` normalised; their means and `1/√(variance + ε)` go to `stats`, in turn.
    fn layer_norm_rows[M](
        x: &[f32],
        y: &mut [Unwritten],
        stats: &mut [Unwritten],
        weight: &[f32],
        bias: &[f32],
        epsilon: f32,
    ) {
        let h = weight.len();
        let rows = x.chunks_exact(h).zip(y.chunks_exact_mut(h));
        for ((x, y), stats) in rows.zip(stats.chunks_exact_mut(2)) {
            let mean = sum(x, |v| v) / h as f32;
            let variance = sum(x, |v| (v - mean) * (v - mean)) / h as f32;
            let scale = 1.0 / (variance + epsilon).sqrt();
            stats[0].write(mean);
            stats[1].write(scale);
            for i in 0..h {
                y[i].write(M::mul_add((x[i] - mean) * scale, weight[i], bias[i]));
            }
        }
    }
}

/// A norm of `x`, and `per_row` statistics of each of its rows: `normalise` takes some rows at a time.
fn normalised(
    x: &FlexTensor,
    per_row: usize,
    normalise: impl Fn(&[f32], &mut [Unwritten], &mut [Unwritten]) + Sync,
) -> (FlexTensor, FlexTensor) {
    let ((rows, h), shape) = (rows_of(x), shape_of(x));
    let x = Values::of(x);
    let mut stats = Vec::new();
    let at_once = rows_at_once(h);
    // SAFETY: every row of both is written by the task that has it.
    let y = unsafe {
        written(rows * h, |y| {
            stats = written(rows * per_row, |stats| {
                let tasks = x.par_chunks(at_once * h).zip(y.par_chunks_mut(at_once * h));
                let tasks = tasks.zip(stats.par_chunks_mut(at_once * per_row));
                tasks.for_each(|((x, y), stats)| normalise(x, y, stats));
            });
        })
    };
    let stats = tensor(stats, Shape::new([rows, per_row]));
    (tensor(y, shape), stats)
}

vectors! {
    fn add_rows[M](x: &[f32], residual: &[f32], sums: &mut [Unwritten]) {
        for ((x, residual), sum) in x.iter().zip(residual).zip(sums) {
            sum.write(residual + x);
        }
    }
}

/// `residual + x`, and what [`normalised`] makes of it while its rows are at hand.
fn added_and_normalised(
    x: &FlexTensor,
    residual: &FlexTensor,
    per_row: usize,
    normalise: impl Fn(&[f32], &mut [Unwritten], &mut [Unwritten]) + Sync,
) -> [FlexTensor; 3] {
    let ((rows, h), shape) = (rows_of(x), shape_of(x));
    let (x, residual) = (Values::of(x), Values::of(residual));
    let (mut y, mut stats) = (Vec::new(), Vec::new());
    let at_once = rows_at_once(h);
    // SAFETY: every row of all three is written by the task that has it; sums are read after they are written.
    let sums = unsafe {
        written(rows * h, |sums| {
            y = written(rows * h, |y| {
                stats = written(rows * per_row, |stats| {
                    let inputs = x.par_chunks(at_once * h);
                    let inputs = inputs.zip(residual.par_chunks(at_once * h));
                    let outputs = y.par_chunks_mut(at_once * h);
                    let outputs = outputs.zip(stats.par_chunks_mut(at_once * per_row));
                    let tasks = inputs.zip(sums.par_chunks_mut(at_once * h));
                    tasks
                        .zip(outputs)
                        .for_each(|(((x, residual), sums), (y, stats))| {
                            add_rows(x, residual, sums);
                            normalise(sums.assume_init_ref(), y, stats);
                        });
                });
            });
        })
    };
    let stats = tensor(stats, Shape::new([rows, per_row]));
    [tensor(sums, shape.clone()), tensor(y, shape), stats]
}

pub fn layer_norm(
    x: &FlexTensor,
    weight: &FlexTensor,
    bias: &FlexTensor,
    epsilon: f32,
) -> (FlexTensor, FlexTensor) {
    let (weight, bias) = (Values::of(weight), Values::of(bias));
    normalised(x, 2, |x, y, stats| {
        layer_norm_rows(x, y, stats, &weight, &bias, epsilon);
    })
}

pub fn added_layer_norm(
    x: &FlexTensor,
    residual: &FlexTensor,
    weight: &FlexTensor,
    bias: &FlexTensor,
    epsilon: f32,
) -> [FlexTensor; 3] {
    let (weight, bias) = (Values::of(weight), Values::of(bias));
    added_and_normalised(x, residual, 2, |x, y, stats| {
        layer_norm_rows(x, y, stats, &weight, &bias, epsilon);
    })
}

vectors! {
    /// The input's gradient of some rows, added to what it is `so_far`, and these rows' part of the weight's and the
    /// bias's, one after another.
    fn layer_norm_rows_backward[M](
        x: &[f32],
        dy: &[f32],
        so_far: Option<&[f32]>,
        dx: &mut [Unwritten],
        stats: &[f32],
        weight: &[f32],
        sums: &mut [f32],
    ) {
        let h = weight.len();
        let (d_weight, d_bias) = sums.split_at_mut(h);
        let d_bias = &mut d_bias[..h];
        let rows = x.chunks_exact(h).zip(dy.chunks_exact(h)).zip(dx.chunks_exact_mut(h));
        for (row, (((x, dy), dx), stats)) in rows.zip(stats.chunks_exact(2)).enumerate() {
            let so_far = so_far.map(|so_far| &so_far[row * h..][..h]);
            let (mean, scale) = (stats[0], stats[1]);
            let g_sum = sum2(dy, weight, |dy, w| dy * w);
            // Σ dy w (x - mean) needs three streams: in lanes of its own.
            let (mut lanes, whole) = ([0f32; 32], h / 32 * 32);
            let mut at = 0;
            while at < whole {
                for i in 0..32 {
                    let g = dy[at + i] * weight[at + i];
                    lanes[i] = M::mul_add(g, x[at + i] - mean, lanes[i]);
                }
                at += 32;
            }
            let mut along: f32 = lanes.iter().sum();
            for i in whole..h {
                along += dy[i] * weight[i] * (x[i] - mean);
            }
            let (g_mean, along) = (g_sum / h as f32, along * scale / h as f32);
            for i in 0..h {
                let normal = (x[i] - mean) * scale;
                let g = dy[i] * weight[i];
                let own = scale * (g - g_mean - normal * along);
                dx[i].write(so_far.map_or(own, |so_far| so_far[i] + own));
                d_weight[i] = M::mul_add(dy[i], normal, d_weight[i]);
                d_bias[i] += dy[i];
            }
        }
    }
}

/// The input's gradient, and the sums over all rows of the `width` values that each adds: `run` takes input,
/// output's gradient and statistics, `per_row`, of some rows at a time.
fn backward(
    [x, dy, stats]: [&FlexTensor; 3],
    per_row: usize,
    width: usize,
    so_far: Option<&FlexTensor>,
    run: impl Fn([&[f32]; 3], Option<&[f32]>, &mut [Unwritten], &mut [f32]) + Sync,
) -> (FlexTensor, Vec<f32>) {
    let ((rows, h), shape) = (rows_of(x), shape_of(x));
    let (x, stats, dy) = (Values::of(x), Values::of(stats), Values::of(dy));
    let so_far = so_far.map(Values::of);
    let at_once = rows_at_once(h);
    let mut sums = Vec::new();
    // SAFETY: every row is written by the task that has it.
    let dx = unsafe {
        written(rows * h, |dx| {
            let tasks = x.par_chunks(at_once * h).zip(dy.par_chunks(at_once * h));
            let tasks = tasks.zip(dx.par_chunks_mut(at_once * h));
            let tasks = tasks.zip(stats.par_chunks(at_once * per_row));
            tasks
                .enumerate()
                .map(|(task, (((x, dy), dx), stats))| {
                    let so_far = so_far.as_ref();
                    let so_far = so_far.map(|so_far| &so_far[task * at_once * h..][..x.len()]);
                    let mut sums = vec![0f32; width];
                    run([x, dy, stats], so_far, dx, &mut sums);
                    sums
                })
                .collect_into_vec(&mut sums);
        })
    };
    (tensor(dx, shape), added_up(sums, width))
}

pub fn layer_norm_backward(
    x: &FlexTensor,
    stats: &FlexTensor,
    weight: &FlexTensor,
    dy: &FlexTensor,
    so_far: Option<&FlexTensor>,
) -> [FlexTensor; 3] {
    let h = rows_of(x).1;
    let weight = Values::of(weight);
    let run = |[x, dy, stats]: [&[f32]; 3],
               so_far: Option<&[f32]>,
               dx: &mut [Unwritten],
               sums: &mut [f32]| {
        layer_norm_rows_backward(x, dy, so_far, dx, stats, &weight, sums);
    };
    let (dx, mut d_weight) = backward([x, dy, stats], 2, 2 * h, so_far, run);
    let d_bias = d_weight.split_off(h);
    [
        dx,
        tensor(d_weight, Shape::new([h])),
        tensor(d_bias, Shape::new([h])),
    ]
}

/// The parts' sum, in their order.
pub fn added_up(parts: Vec<Vec<f32>>, len: usize) -> Vec<f32> {
    let mut parts = parts.into_iter();
    let mut total = parts.next().unwrap_or_else(|| vec![0.0; len]);
    for part in parts {
        total
            .iter_mut()
            .zip(&part)
            .for_each(|(sum, value)| *sum += value);
    }
    total
}

vectors! {
    /// Rows of `x` over their root mean squares, of which the reciprocals go to `scales`.
    fn rms_norm_rows[M](
        x: &[f32],
        y: &mut [Unwritten],
        scales: &mut [Unwritten],
        weight: &[f32],
        epsilon: f32,
    ) {
        let h = weight.len();
        let rows = x.chunks_exact(h).zip(y.chunks_exact_mut(h));
        for ((x, y), to) in rows.zip(scales) {
            let scale = 1.0 / (sum(x, |v| v * v) / h as f32 + epsilon).sqrt();
            to.write(scale);
            for i in 0..h {
                y[i].write(x[i] * scale * weight[i]);
            }
        }
    }
}

pub fn rms_norm(x: &FlexTensor, weight: &FlexTensor, epsilon: f32) -> (FlexTensor, FlexTensor) {
    let weight = Values::of(weight);
    normalised(x, 1, |x, y, scales| {
        rms_norm_rows(x, y, scales, &weight, epsilon);
    })
}

pub fn added_rms_norm(
    x: &FlexTensor,
    residual: &FlexTensor,
    weight: &FlexTensor,
    epsilon: f32,
) -> [FlexTensor; 3] {
    let weight = Values::of(weight);
    added_and_normalised(x, residual, 1, |x, y, scales| {
        rms_norm_rows(x, y, scales, &weight, epsilon);
    })
}

vectors! {
    /// The input's gradient of some rows, added to what it is `so_far`, and these rows' part of the weight's.
    fn rms_norm_rows_backward[M](
        x: &[f32],
        dy: &[f32],
        so_far: Option<&[f32]>,
        dx: &mut [Unwritten],
        scales: &[f32],
        weight: &[f32],
        d_weight: &mut [f32],
    ) {
        let h = weight.len();
        let d_weight = &mut d_weight[..h];
        let rows = x.chunks_exact(h).zip(dy.chunks_exact(h)).zip(dx.chunks_exact_mut(h));
        for (row, (((x, dy), dx), scale)) in rows.zip(scales).enumerate() {
            let so_far = so_far.map(|so_far| &so_far[row * h..][..h]);
            let (mut lanes, whole) = ([0f32; 32], h / 32 * 32);
            let mut at = 0;
            while at < whole {
                for i in 0..32 {
                    lanes[i] = M::mul_add(dy[at + i] * weight[at + i], x[at + i], lanes[i]);
                }
                at += 32;
            }
            let mut along: f32 = lanes.iter().sum();
            for i in whole..h {
                along += dy[i] * weight[i] * x[i];
            }
            let along = along * scale * scale / h as f32;
            for i in 0..h {
                let own = scale * (dy[i] * weight[i] - x[i] * along);
                dx[i].write(so_far.map_or(own, |so_far| so_far[i] + own));
                d_weight[i] = M::mul_add(dy[i], x[i] * scale, d_weight[i]);
            }
        }
    }
}

pub fn rms_norm_backward(
    x: &FlexTensor,
    scales: &FlexTensor,
    weight: &FlexTensor,
    dy: &FlexTensor,
    so_far: Option<&FlexTensor>,
) -> [FlexTensor; 2] {
    let h = rows_of(x).1;
    let weight = Values::of(weight);
    let run = |[x, dy, scales]: [&[f32]; 3],
               so_far: Option<&[f32]>,
               dx: &mut [Unwritten],
               d_weight: &mut [f32]| {
        rms_norm_rows_backward(x, dy, so_far, dx, scales, &weight, d_weight);
    };
    let (dx, d_weight) = backward([x, dy, scales], 1, h, so_far, run);
    [dx, tensor(d_weight, Shape::new([h]))]
}
