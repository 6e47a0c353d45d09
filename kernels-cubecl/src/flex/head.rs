//! The output layer with cross entropy: logits exist for a block of tokens at a time.

use super::gemm::{Matrix, Shared, Threads, multiply, multiply_by_rows};
use super::simd::{exp, max, sum, vectors};
use super::{Unwritten, Values, changed, shape_of, tensor, written};
use crate::head_loss::{HeadLoss, HeadShard, Reduce};
use burn::tensor::Shape;
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

vectors! {
    fn largest[M](x: &[f32]) -> f32 {
        max(x)
    }
}

vectors! {
    /// Logits to exponentials, whose sum it returns.
    fn exponentials[M](x: &mut [f32], top: f32) -> f32 {
        for x in x.iter_mut() {
            *x = exp::<M>(*x - top);
        }
        sum(x, |v| v)
    }
}

vectors! {
    fn scale_by[M](x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}

pub fn head_loss(
    hidden: &FlexTensor,
    weight: &FlexTensor,
    shard: &HeadShard<'_>,
    gradients: bool,
) -> HeadLoss<Flex> {
    let (hidden_shape, weight_shape) = (shape_of(hidden), shape_of(weight));
    let ([n, h], v) = ([hidden_shape[0], hidden_shape[1]], weight_shape[0]);
    assert!(n > 0, "a loss of at least one token");
    let (x, w) = (Values::of(hidden), Values::of(weight));
    let at_once = shard.tokens_at_once.clamp(1, n.max(1));
    let mut losses = vec![0f32; n];
    let mut logits = Box::new_uninit_slice(at_once * v);
    let mut block = |to: Option<(Shared, Shared)>| {
        for from in (0..n).step_by(at_once) {
            let to_row = n.min(from + at_once);
            let tokens = to_row - from;
            let logits: &mut [Unwritten] = &mut logits[..tokens * v];
            let x = Matrix::new(&x[from * h..to_row * h], [tokens, h], h);
            let w = Matrix::new(&w, [v, h], h);
            // SAFETY: the logits are this function's own, and the product writes them all.
            let logits = unsafe {
                let to = Shared::new(logits).at(0);
                multiply(to, v, (x, w.transposed()), 1.0, false, Threads::All);
                logits.assume_init_mut()
            };
            losses_of(logits, &mut losses[from..to_row], from, shard, to.is_some());
            let Some((dx, dw)) = &to else { continue };
            let d = Matrix::new(logits, [tokens, v], v);
            // SAFETY: this loop alone writes; the first block gives the weight's gradient its values.
            unsafe {
                multiply(dx.at(from * h), h, (d, w), 1.0, false, Threads::All);
                multiply_by_rows(*dw, h, (d.transposed(), x), from > 0, 512);
            }
        }
    };
    if !gradients {
        block(None);
        let losses = tensor(losses, Shape::new([n]));
        return HeadLoss {
            losses,
            gradients: None,
        };
    }
    let mut dw = Vec::new();
    // SAFETY: every block writes its rows of the one, and the first all of the other.
    let dx = unsafe {
        written(n * h, |to_x| {
            dw = written(v * h, |to_w| {
                block(Some((Shared::new(to_x), Shared::new(to_w))))
            });
        })
    };
    HeadLoss {
        losses: tensor(losses, Shape::new([n])),
        gradients: Some((tensor(dx, hidden_shape), tensor(dw, weight_shape))),
    }
}

/// Losses of the tokens from `first` on; with `gradients` the logits become their gradients.
fn losses_of(
    logits: &mut [f32],
    losses: &mut [f32],
    first: usize,
    shard: &HeadShard<'_>,
    gradients: bool,
) {
    let (n, v) = (losses.len(), logits.len() / losses.len());
    // Padding comes last, and takes no probability.
    let known = shard.known;
    let mut top = vec![f32::NEG_INFINITY; n];
    if known > 0 {
        let rows = logits.par_chunks(v).zip(&mut top);
        rows.for_each(|(logits, top)| *top = largest(&logits[..known]));
    }
    shard.reduce(&mut top, Reduce::Max);
    // Sums of exponentials, and the targets' logits less the largest.
    let mut message = vec![0f32; 2 * n];
    let (sums, at_target) = message.split_at_mut(n);
    let targets = &shard.targets[first..first + n];
    let rows = logits.par_chunks_mut(v).zip(&top).zip(sums).zip(at_target);
    rows.enumerate()
        .for_each(|(i, (((logits, top), total), at_target))| {
            if let Some(column) = targets[i] {
                *at_target = logits[column] - top;
            }
            *total = exponentials(&mut logits[..known], *top);
            logits[known..].fill(0.0);
        });
    shard.reduce(&mut message, Reduce::Sum);
    let (sums, at_target) = message.split_at(n);
    for ((loss, total), at_target) in losses.iter_mut().zip(sums).zip(at_target) {
        *loss = total.ln() - at_target;
    }
    if gradients {
        let d_losses = &shard.d_losses[first..first + n];
        let rows = logits.par_chunks_mut(v).zip(sums).enumerate();
        rows.for_each(|(i, (logits, total))| {
            let of_loss = d_losses[i];
            scale_by(&mut logits[..known], of_loss / total);
            if let Some(column) = targets[i] {
                logits[column] -= of_loss;
            }
        });
    }
}

/// `factor · x`, in place where nobody else holds it.
pub fn scaled(x: FlexTensor, factor: f32) -> FlexTensor {
    if factor == 1.0 {
        return x;
    }
    changed(x, |values| {
        values
            .par_chunks_mut(1 << 14)
            .for_each(|values| scale_by(values, factor));
    })
}
