//! What reductions add up: values of 32 or 16 bits.

use super::ReduceOp;
use burn::tensor::{bf16, f16};

/// Values that a rank brings.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

/// Values that a rank gets, or brings and gets.
#[derive(Debug)]
pub enum ValuesMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

impl Values<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Values::F32(values) => values.len(),
            Values::Bf16(values) => values.len(),
            Values::F16(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their bytes.
    pub fn num_bytes(&self) -> usize {
        match self {
            Values::F32(values) => size_of_val(*values),
            Values::Bf16(values) => size_of_val(*values),
            Values::F16(values) => size_of_val(*values),
        }
    }
}

impl ValuesMut<'_> {
    /// The same, to be looked at.
    pub fn as_values(&self) -> Values<'_> {
        match self {
            ValuesMut::F32(values) => Values::F32(values),
            ValuesMut::Bf16(values) => Values::Bf16(values),
            ValuesMut::F16(values) => Values::F16(values),
        }
    }

    /// Takes `values`, of the same type and number.
    ///
    /// # Panics
    /// If they are not.
    pub fn copy_from(&mut self, values: Values<'_>) {
        match (self, values) {
            (ValuesMut::F32(to), Values::F32(from)) => to.copy_from_slice(from),
            (ValuesMut::Bf16(to), Values::Bf16(from)) => to.copy_from_slice(from),
            (ValuesMut::F16(to), Values::F16(from)) => to.copy_from_slice(from),
            (to, from) => panic!("{to:?} cannot take {from:?}"),
        }
    }
}

/// A type whose values are added up, in f32.
pub(super) trait Number: Copy {
    fn widen(self) -> f32;
    /// Rounded to the type.
    fn narrow(value: f32) -> Self;
}

impl Number for f32 {
    #[inline]
    fn widen(self) -> f32 {
        self
    }

    #[inline]
    fn narrow(value: f32) -> f32 {
        value
    }
}

impl Number for bf16 {
    #[inline]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline]
    fn narrow(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}

impl Number for f16 {
    #[inline]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline]
    fn narrow(value: f32) -> f16 {
        f16::from_f32(value)
    }
}

/// Takes the values of the first rank.
pub(super) fn start<T: Number>(sums: &mut [f32], values: &[T]) {
    sums.iter_mut()
        .zip(values)
        .for_each(|(sum, value)| *sum = value.widen());
}

/// Adds those of the next one.
pub(super) fn accumulate<T: Number>(sums: &mut [f32], values: &[T], op: ReduceOp) {
    let pairs = sums.iter_mut().zip(values);
    match op {
        ReduceOp::Sum => pairs.for_each(|(sum, value)| *sum += value.widen()),
        ReduceOp::Max => pairs.for_each(|(sum, value)| *sum = sum.max(value.widen())),
    }
}

/// The result, rounded once.
pub(super) fn finish<T: Number>(values: &mut [T], sums: &[f32]) {
    values
        .iter_mut()
        .zip(sums)
        .for_each(|(value, sum)| *value = T::narrow(*sum));
}
