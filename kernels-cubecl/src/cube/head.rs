//! The output layer with cross entropy: logits exist for a block of tokens at a time, and become their gradients where
//! they lie.

use super::sum::{cube_max, cube_sum};
use super::{Units, addresses, contiguous, cubes, elem, empty, row};
use crate::head_loss::{HeadLoss, HeadShard, Reduce};
use crate::{narrowed, widened};
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::{TensorMetadata, try_read_sync};
use burn::tensor::{DType, Slice, TensorData};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// A target that another shard has.
const ELSEWHERE: u32 = u32::MAX;

/// Of each token the largest logit, the sum of exponentials less it, and the target's logit: one pass over a row.
/// `stats [3, tokens]`
#[cube(launch_unchecked, address_type = "dynamic")]
fn logit_stats<F: Float>(
    logits: &[F],
    targets: &[u32],
    stats: &mut [f32],
    tokens: usize,
    width: usize,
    known: usize,
    #[comptime] units: usize,
    #[comptime] planes: bool,
    #[define(F)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let mut shared = Shared::<[f32]>::new_slice(units);
    let token = CUBE_POS;
    if token < tokens {
        let mut top = f32::min_value();
        let mut sum = 0.0f32;
        let mut column = unit;
        while column < known {
            let logit = f32::cast_from(logits[token * width + column]);
            let higher = max(top, logit);
            sum = sum * (top - higher).exp() + (logit - higher).exp();
            top = higher;
            column += units;
        }
        let highest = cube_max(top, &mut shared, units, planes);
        let total = cube_sum(sum * (top - highest).exp(), &mut shared, units, planes);
        if unit == 0 {
            stats[token] = highest;
            stats[tokens + token] = total;
            let target = targets[token];
            let mut at_target = 0.0f32;
            if target != ELSEWHERE {
                at_target = f32::cast_from(logits[token * width + target as usize]);
            }
            stats[2 * tokens + token] = at_target;
        }
    }
}

/// Logits to their gradients, in place; padding has none. `stats` are those of all shards.
#[cube(launch_unchecked, address_type = "dynamic")]
fn logit_gradients<F: Float>(
    logits: &mut [F],
    targets: &[u32],
    stats: &[f32],
    d_losses: &[f32],
    tokens: usize,
    width: usize,
    known: usize,
    #[comptime] units: usize,
    #[define(F)] _dtype: ElemType,
) {
    let token = CUBE_POS;
    if token < tokens {
        let top = stats[token];
        let of_loss = d_losses[token];
        let each = of_loss / stats[tokens + token];
        let target = targets[token];
        let mut column = UNIT_POS as usize;
        while column < width {
            let at = token * width + column;
            let mut d = 0.0f32;
            if column < known {
                d = (f32::cast_from(logits[at]) - top).exp() * each;
                if column as u32 == target {
                    d -= of_loss;
                }
            }
            logits[at] = F::cast_from(d);
            column += units;
        }
    }
}

pub fn head_loss(
    hidden: CubeTensor,
    weight: CubeTensor,
    shard: &HeadShard<'_>,
    gradients: bool,
) -> HeadLoss<CubeBackend> {
    type B = CubeBackend;
    let (hidden, weight) = (contiguous(hidden), contiguous(weight));
    let [n, h] = hidden.shape().dims();
    assert!(n > 0, "a loss of at least one token");
    let at_once = shard.tokens_at_once.clamp(1, n);
    let targets = shard.targets.iter();
    let targets: Vec<u32> = targets.map(|t| t.map_or(ELSEWHERE, |t| t as u32)).collect();
    let device = hidden.device.clone();
    let (mut losses, mut d_hidden, mut d_weight) = (Vec::new(), Vec::new(), None);
    for from in (0..n).step_by(at_once) {
        let to = n.min(from + at_once);
        let x = match to - from == n {
            true => hidden.clone(),
            false => {
                let slices = [Slice::from(from..to), Slice::from(0..h)];
                contiguous(B::float_slice(hidden.clone(), &slices))
            }
        };
        let logits = B::float_matmul(x.clone(), B::float_transpose(weight.clone()));
        let logits = contiguous(logits);
        let upload = |values: TensorData| B::int_from_data(values, &device);
        let targets = upload(TensorData::new(targets[from..to].to_vec(), [to - from]));
        let stats = joined(stats(&logits, &targets, shard.known), shard, from..to);
        losses.push(losses_of(&stats));
        if !gradients {
            continue;
        }
        let of_losses = shard.d_losses[from..to].to_vec();
        let of_losses = B::float_from_data(TensorData::new(of_losses, [to - from]), &device);
        let d = d_logits(logits, &targets, &stats, of_losses, shard.known);
        d_hidden.push(B::float_matmul(d.clone(), weight.clone()));
        let of_block = B::float_matmul(B::float_transpose(d), x);
        d_weight = Some(match d_weight {
            None if to == n => of_block,
            None => widened::<B>(of_block),
            Some(sum) => B::float_add(sum, widened::<B>(of_block)),
        });
    }
    let whole = |mut parts: Vec<CubeTensor>| match parts.len() {
        1 => parts.swap_remove(0),
        _ => B::float_cat(parts, 0),
    };
    let d_weight = d_weight.map(|sum| narrowed::<B>(sum, weight.dtype));
    HeadLoss {
        losses: whole(losses),
        gradients: d_weight.map(|d_weight| (whole(d_hidden), d_weight)),
    }
}

fn units_for(logits: &CubeTensor) -> (Units, usize) {
    let units = Units::of(&logits.client);
    (units, units.for_work(logits.shape()[1].div_ceil(8), 1024))
}

fn stats(logits: &CubeTensor, targets: &CubeTensor, known: usize) -> CubeTensor {
    let [tokens, width] = logits.shape().dims();
    let stats = empty(logits, [3, tokens], DType::F32);
    let (on, units) = units_for(logits);
    // SAFETY: the kernel reads `tokens` rows of `width` logits and a target for each, and writes three numbers.
    unsafe {
        logit_stats::launch_unchecked(
            &logits.client,
            cubes(&logits.client, tokens),
            CubeDim::new_1d(units as u32),
            addresses(&[logits]),
            logits.clone().into_buffer_arg(),
            targets.clone().into_buffer_arg(),
            stats.clone().into_buffer_arg(),
            tokens,
            width,
            known,
            units,
            on.planes,
            elem(logits),
        );
    }
    stats
}

/// Statistics of all shards.
fn joined(stats: CubeTensor, shard: &HeadShard<'_>, tokens: std::ops::Range<usize>) -> CubeTensor {
    let Some(reduce) = shard.reduce else {
        return stats;
    };
    let (n, device) = (tokens.len(), stats.device.clone());
    let data = try_read_sync(CubeBackend::float_into_data(stats));
    let data = data
        .expect("a device that is read at once")
        .expect("statistics of logits");
    let mut values: Vec<f32> = data.try_into_vec().expect("the statistics are f32");
    let (tops, message) = values.split_at_mut(n);
    let own = tops.to_vec();
    reduce(tops, Reduce::Max);
    let (sums, at_target) = message.split_at_mut(n);
    for i in 0..n {
        sums[i] *= (own[i] - tops[i]).exp();
        at_target[i] = match shard.targets[tokens.start + i] {
            Some(_) => at_target[i] - tops[i],
            None => 0.0,
        };
    }
    reduce(message, Reduce::Sum);
    let (_, at_target) = message.split_at_mut(n);
    for (at_target, top) in at_target.iter_mut().zip(tops) {
        *at_target += *top;
    }
    CubeBackend::float_from_data(TensorData::new(values, [3, n]), &device)
}

/// `ln sum + largest - target's`
fn losses_of(stats: &CubeTensor) -> CubeTensor {
    type B = CubeBackend;
    let n = stats.shape()[1];
    let [top, sum, at_target] = [0, 1, 2].map(|i| row(stats, i, n));
    B::float_add(B::float_log(sum), B::float_sub(top, at_target))
}

fn d_logits(
    logits: CubeTensor,
    targets: &CubeTensor,
    stats: &CubeTensor,
    d_losses: CubeTensor,
    known: usize,
) -> CubeTensor {
    let [tokens, width] = logits.shape().dims();
    let units = units_for(&logits).1;
    // SAFETY: the kernel reads and writes `tokens` rows of `width` logits, which nobody else holds.
    unsafe {
        logit_gradients::launch_unchecked(
            &logits.client,
            cubes(&logits.client, tokens),
            CubeDim::new_1d(units as u32),
            addresses(&[&logits]),
            logits.clone().into_buffer_arg(),
            targets.clone().into_buffer_arg(),
            stats.clone().into_buffer_arg(),
            d_losses.into_buffer_arg(),
            tokens,
            width,
            known,
            units,
            elem(&logits),
        );
    }
    logits
}

#[cfg(feature = "ptx")]
pub fn catalog(all: &mut Vec<super::catalog::Entry>) {
    use super::catalog::{Entry, TYPES, buffer as b, settings};
    for (name, dtype, _) in TYPES {
        all.push(Entry::new(
            format!("cross_entropy_forward {name}"),
            64,
            move |t| {
                Box::new(logit_stats::LogitStats::new(
                    settings(CubeDim::new_1d(1024)),
                    t.device,
                    t.properties,
                    b(),
                    b(),
                    b(),
                    (),
                    (),
                    (),
                    1024,
                    true,
                    dtype,
                ))
            },
        ));
        all.push(Entry::new(
            format!("cross_entropy_backward {name}"),
            64,
            move |t| {
                Box::new(logit_gradients::LogitGradients::new(
                    settings(CubeDim::new_1d(1024)),
                    t.device,
                    t.properties,
                    b(),
                    b(),
                    b(),
                    b(),
                    (),
                    (),
                    (),
                    1024,
                    dtype,
                ))
            },
        ));
    }
}
