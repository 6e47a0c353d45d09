//! Norms that do not depend on how the gradients are spread over ranks.

use crate::comm::{Communicator, all_gather_values};
use crate::error::Result;
use crate::shard::slice;
use burn::tensor::Tensor;
use burn_megatron_kernels::flat::{self, Ranges};
use rayon::prelude::*;
use std::iter::Sum;
use std::ops::Add;

/// Elements summed by one task.
const CHUNK: usize = 1 << 16;

/// A sum of squares in twice the precision of f64: `high + low`, the second what rounding took from the
/// first (Knuth's two-sum). In whatever order and groups f32 squares are added, the sum rounds to the same
/// f64: for a rounding to tip over they would have to meet in their first 100 bits.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SumOfSquares {
    high: f64,
    low: f64,
}

impl SumOfSquares {
    /// Of values whose squares f64 holds exactly.
    pub fn of(values: &[f32]) -> Self {
        // Each chunk's sum is of its own elements in their own order, whoever computes it.
        let chunks = values.par_chunks(CHUNK).map(of_chunk);
        chunks.collect::<Vec<_>>().into_iter().sum()
    }

    /// Of the elements of a tensor in each of the ranges, added up there in f32.
    pub fn of_ranges(values: &Tensor<1>, ranges: &Ranges) -> Self {
        let sums = ranges.iter();
        let sums = sums.map(|range| flat::square_sum(slice(values, range)));
        let sums: Vec<Tensor<1>> = sums.collect();
        if sums.is_empty() {
            return SumOfSquares::default();
        }
        let sums = Tensor::cat(sums, 0).into_data();
        let sums = sums
            .iter::<f64>()
            .map(|high| SumOfSquares { high, low: 0.0 });
        sums.sum()
    }

    /// The sum over a group, the same on every rank.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn all_reduce(self, comm: &dyn Communicator) -> Result<Self> {
        let all = all_gather_values(comm, [self.high, self.low])?;
        Ok(all
            .into_iter()
            .map(|[high, low]| SumOfSquares { high, low })
            .sum())
    }

    /// Rounded to f64.
    pub fn value(self) -> f64 {
        self.high + self.low
    }
}

impl Add for SumOfSquares {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (high, error) = two_sum(self.high, other.high);
        if !high.is_finite() {
            return SumOfSquares { high, low: 0.0 };
        }
        let (high, low) = two_sum(high, error + self.low + other.low);
        SumOfSquares { high, low }
    }
}

impl Sum for SumOfSquares {
    fn sum<I: Iterator<Item = Self>>(sums: I) -> Self {
        sums.fold(SumOfSquares::default(), Add::add)
    }
}

/// The rounded sum, and what rounding took.
#[inline]
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part_of_b = sum - a;
    let error = (a - (sum - part_of_b)) + (b - part_of_b);
    (sum, error)
}

/// Eight sums side by side, for the processor's vectors.
fn of_chunk(values: &[f32]) -> SumOfSquares {
    let (eights, rest) = values.as_chunks::<8>();
    let (mut high, mut low) = ([0f64; 8], [0f64; 8]);
    for eight in eights {
        for lane in 0..8 {
            let value = f64::from(eight[lane]);
            let (sum, error) = two_sum(high[lane], value * value);
            high[lane] = sum;
            low[lane] += error;
        }
    }
    let lanes = high.into_iter().zip(low);
    let lanes = lanes.map(|(high, low)| SumOfSquares { high, low });
    let rest = rest.iter().map(|value| SumOfSquares {
        high: f64::from(*value) * f64::from(*value),
        low: 0.0,
    });
    lanes.chain(rest).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_are_summed_whatever_the_length() {
        for len in 0..40 {
            let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let want: f64 = (0..len).map(|i| (i * i) as f64).sum();
            assert_eq!(SumOfSquares::of(&values).value(), want);
        }
    }

    #[test]
    fn a_tensors_ranges_are_summed() {
        let values: Vec<f32> = (0..5000).map(|i| (i % 7) as f32).collect();
        let tensor = crate::shard::upload(values.clone(), &burn::tensor::Device::flex());
        for bounds in [&[0, 5000][..], &[1, 3, 3, 70, 4000, 5000], &[]] {
            let ranges = bounds.chunks(2).map(|range| range[0]..range[1]);
            let parts = ranges.clone().map(|range| SumOfSquares::of(&values[range]));
            let want: SumOfSquares = parts.sum();
            let got = SumOfSquares::of_ranges(&tensor, &Ranges::ascending(ranges));
            assert_eq!(got.value(), want.value());
        }
    }

    #[test]
    fn groups_and_order_change_no_bit() {
        // Over many magnitudes, where a plain sum depends on both.
        let value = |i: u32| {
            let bits = i.wrapping_mul(2_654_435_761);
            (bits as f32 / u32::MAX as f32) * 10f32.powi((bits % 9) as i32 - 6)
        };
        let mut values: Vec<f32> = (0..200_000).map(value).collect();
        let want = SumOfSquares::of(&values).value();
        for parts in [2, 3, 7, 1000, 9999] {
            let pieces = values.chunks(values.len().div_ceil(parts));
            let sum: SumOfSquares = pieces.map(SumOfSquares::of).sum();
            assert_eq!(sum.value(), want, "{parts}");
        }
        values.reverse();
        assert_eq!(SumOfSquares::of(&values).value(), want);
        values.rotate_left(77_777);
        assert_eq!(SumOfSquares::of(&values).value(), want);
    }

    #[test]
    fn what_is_not_a_number_stays_none() {
        assert!(SumOfSquares::of(&[1.0, f32::NAN]).value().is_nan());
        assert_eq!(SumOfSquares::of(&[f32::INFINITY; 9]).value(), f64::INFINITY);
    }
}
