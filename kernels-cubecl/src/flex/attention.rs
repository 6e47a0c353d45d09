//! Causal attention on packed queries, keys and values. (Dao et al. 2022 for the backward from the log-sum-exp.)
//! A head's scores exist for a block of rows at a time.

use super::gemm::{Matrix, Shared, Threads, multiply};
use super::simd::{exp, max, sum, sum2, vectors};
use super::{Values, shape_of, tensor, written};
use crate::attention::AttentionOptions;
use crate::dropout::AttentionDropout;
use burn::tensor::Shape;
use burn_flex::FlexTensor;
use rayon::prelude::*;

/// Rows of scores at a time.
const BLOCK: usize = 64;

/// Where the heads lie in `[s, n, (r + 2) d]`, and their output in `[s, n, r d]`.
#[derive(Clone, Copy)]
struct Heads {
    s: usize,
    /// Groups of one head of keys and values.
    n: usize,
    /// Query heads in each.
    r: usize,
    d: usize,
}

impl Heads {
    fn of(qkv: &FlexTensor, options: &AttentionOptions) -> Self {
        let shape = shape_of(qkv);
        let (r, d) = (options.queries_per_group, options.head_width);
        assert_eq!(
            shape[2],
            (r + 2) * d,
            "queries, a key and a value in each group"
        );
        Heads {
            s: shape[0],
            n: shape[1],
            r,
            d,
        }
    }

    /// From one position to the next.
    fn stride(&self) -> usize {
        self.n * (self.r + 2) * self.d
    }

    fn out_stride(&self) -> usize {
        self.n * self.r * self.d
    }

    /// The first element of a part of a group: its query heads, the key, the value.
    fn start(&self, group: usize, part: usize) -> usize {
        (group * (self.r + 2) + part) * self.d
    }

    fn out_start(&self, group: usize, head: usize) -> usize {
        (group * self.r + head) * self.d
    }

    /// Positions `from..to` of a head in a packed buffer.
    fn matrix<'a>(&self, x: &'a [f32], start: usize, from: usize, to: usize) -> Matrix<'a> {
        let stride = self.stride();
        Matrix::new(&x[start + from * stride..], [to - from, self.d], stride)
    }

    fn out_matrix<'a>(&self, x: &'a [f32], start: usize, from: usize, to: usize) -> Matrix<'a> {
        let stride = self.out_stride();
        Matrix::new(&x[start + from * stride..], [to - from, self.d], stride)
    }

    /// Blocks of rows: `from..to`.
    fn blocks(&self) -> impl DoubleEndedIterator<Item = (usize, usize)> + use<> {
        let s = self.s;
        (0..s.div_ceil(BLOCK)).map(move |i| (i * BLOCK, s.min((i + 1) * BLOCK)))
    }
}

vectors! {
    /// Scores of rows `from..` and of `width` columns to probabilities; what is later than a row is 0.
    fn softmax[M](p: &mut [f32], width: usize, from: usize, lse: &mut [f32]) {
        for (row, (p, lse)) in p.chunks_exact_mut(width).zip(lse).enumerate() {
            let (seen, later) = p.split_at_mut(from + row + 1);
            let top = max(seen);
            for v in seen.iter_mut() {
                *v = exp::<M>(*v - top);
            }
            let total = sum(seen, |v| v);
            let each = 1.0 / total;
            for v in seen.iter_mut() {
                *v *= each;
            }
            later.fill(0.0);
            *lse = top + total.ln();
        }
    }
}

vectors! {
    /// Scores to probabilities by their log-sum-exp.
    fn probabilities[M](p: &mut [f32], width: usize, from: usize, lse: &[f32]) {
        for (row, (p, lse)) in p.chunks_exact_mut(width).zip(lse).enumerate() {
            let (seen, later) = p.split_at_mut(from + row + 1);
            for v in seen.iter_mut() {
                *v = exp::<M>(*v - lse);
            }
            later.fill(0.0);
        }
    }
}

vectors! {
    /// `dp` to `p ∘ (dp - dot)`, with `dot` of each row.
    fn softmax_backward[M](p: &[f32], dp: &mut [f32], width: usize, from: usize, dots: &[f32]) {
        let rows = p.chunks_exact(width).zip(dp.chunks_exact_mut(width));
        for (row, ((p, dp), dot)) in rows.zip(dots).enumerate() {
            let (seen, later) = dp.split_at_mut(from + row + 1);
            for (dp, p) in seen.iter_mut().zip(p) {
                *dp = p * (*dp - dot);
            }
            later.fill(0.0);
        }
    }
}

vectors! {
    fn dot[M](a: &[f32], b: &[f32]) -> f32 {
        sum2(a, b, |a, b| a * b)
    }
}

vectors! {
    fn multiply_by[M](x: &mut [f32], factors: &[f32]) {
        for (x, factor) in x.iter_mut().zip(factors) {
            *x *= factor;
        }
    }
}

/// The dropout's factors of rows `from..to` of a head, as wide as the scores.
fn factors(
    dropout: &AttentionDropout,
    (group, head): (usize, usize),
    (from, to): (usize, usize),
    s: usize,
    into: &mut [f32],
) {
    into.fill(0.0);
    for (row, into) in (from..to).zip(into.chunks_exact_mut(to)) {
        dropout.fill(group, head, row, s, &mut into[..=row]);
    }
}

/// Returns the output `[s, n, r d]` and the log-sum-exp of every row of scores `[n r, s]`.
pub fn forward(qkv: &FlexTensor, options: &AttentionOptions) -> (FlexTensor, FlexTensor) {
    let at = Heads::of(qkv, options);
    let (Heads { s, n, r, d }, scale) = (at, options.scale as f32);
    let qkv = Values::of(qkv);
    let mut lse = vec![0f32; n * r * s];
    // SAFETY: every head of every position is written by the task that has the head.
    let out = unsafe {
        written(s * n * r * d, |out| {
            let out = Shared::new(out);
            let buffers = || (vec![0f32; BLOCK * s], Vec::new());
            let heads = lse.par_chunks_mut(s.max(1)).enumerate();
            heads.for_each_init(buffers, |(p, mask), (index, lse)| {
                let (group, head) = (index / r, index % r);
                for (from, to) in at.blocks() {
                    let p = &mut p[..(to - from) * to];
                    let q = at.matrix(&qkv, at.start(group, head), from, to);
                    let k = at.matrix(&qkv, at.start(group, r), 0, to);
                    let v = at.matrix(&qkv, at.start(group, r + 1), 0, to);
                    multiply(
                        p.as_mut_ptr(),
                        to,
                        (q, k.transposed()),
                        scale,
                        false,
                        Threads::One,
                    );
                    softmax(p, to, from, &mut lse[from..to]);
                    if let Some(dropout) = &options.dropout {
                        mask.resize(p.len(), 0.0);
                        factors(dropout, (group, head), (from, to), s, mask);
                        multiply_by(p, mask);
                    }
                    let to_out = out.at(at.out_start(group, head) + from * at.out_stride());
                    let p = Matrix::new(p, [to - from, to], to);
                    multiply(to_out, at.out_stride(), (p, v), 1.0, false, Threads::One);
                }
            });
        })
    };
    (
        tensor(out, Shape::new([s, n, r * d])),
        tensor(lse, Shape::new([n * r, s])),
    )
}

/// The gradient of the packed input.
pub fn backward(
    qkv: &FlexTensor,
    out: &FlexTensor,
    lse: &FlexTensor,
    options: &AttentionOptions,
    d_out: &FlexTensor,
) -> FlexTensor {
    let at = Heads::of(qkv, options);
    let (Heads { s, n, r, d }, scale) = (at, options.scale as f32);
    let shape = shape_of(qkv);
    let (qkv, out, lse) = (Values::of(qkv), Values::of(out), Values::of(lse));
    let d_out = Values::of(d_out);
    // SAFETY: every part of a group is written by the task that has the group: the first block of the first head
    // covers all positions of key and value, and what comes after is added.
    let d_qkv = unsafe {
        written(qkv.len(), |d_qkv| {
            let d_qkv = Shared::new(d_qkv);
            let buffers = || (vec![0f32; BLOCK * s], vec![0f32; BLOCK * s], Vec::new());
            (0..n)
                .into_par_iter()
                .for_each_init(buffers, |(p, dp, mask), group| {
                    let to_part = |part: usize, from: usize| {
                        d_qkv.at(at.start(group, part) + from * at.stride())
                    };
                    let mut dots = [0f32; BLOCK];
                    for head in 0..r {
                        let start = at.out_start(group, head);
                        for (block, (from, to)) in at.blocks().rev().enumerate() {
                            let (rows, add) = (to - from, head > 0 || block > 0);
                            let (p, dp) = (&mut p[..rows * to], &mut dp[..rows * to]);
                            let q = at.matrix(&qkv, at.start(group, head), from, to);
                            let k = at.matrix(&qkv, at.start(group, r), 0, to);
                            let v = at.matrix(&qkv, at.start(group, r + 1), 0, to);
                            let dy = at.out_matrix(&d_out, start, from, to);
                            for (row, dot_of_row) in (from..to).zip(&mut dots) {
                                let here = start + row * at.out_stride()..;
                                *dot_of_row = dot(&out[here.clone()][..d], &d_out[here][..d]);
                            }
                            let keys = (q, k.transposed());
                            multiply(p.as_mut_ptr(), to, keys, scale, false, Threads::One);
                            let values = (dy, v.transposed());
                            multiply(dp.as_mut_ptr(), to, values, 1.0, false, Threads::One);
                            let lse = &lse[(group * r + head) * s..][from..to];
                            probabilities(p, to, from, lse);
                            if let Some(dropout) = &options.dropout {
                                mask.resize(p.len(), 0.0);
                                factors(dropout, (group, head), (from, to), s, mask);
                                multiply_by(dp, mask);
                            }
                            softmax_backward(p, dp, to, from, &dots[..rows]);
                            let ds = Matrix::new(dp, [rows, to], to);
                            let stride = at.stride();
                            let to_q = to_part(head, from);
                            multiply(to_q, stride, (ds, k), scale, false, Threads::One);
                            let queries = (ds.transposed(), q);
                            multiply(to_part(r, 0), stride, queries, scale, add, Threads::One);
                            if options.dropout.is_some() {
                                multiply_by(p, mask);
                            }
                            let kept = (Matrix::new(p, [rows, to], to).transposed(), dy);
                            multiply(to_part(r + 1, 0), stride, kept, 1.0, add, Threads::One);
                        }
                    }
                });
        })
    };
    tensor(d_qkv, shape)
}
