//! Which numbers a model computes with, and how they travel.
//!
//! Under mixed precision (Micikevicius et al. 2018; Megatron's `--bf16` and `--fp16`) weights, activations
//! and what ranks exchange of both have 16 bits. Softmax, normalisation, activation functions and the loss
//! are computed in f32, and gradients are summed, weights updated and the optimizer's state kept in f32.

use crate::comm::ValuesMut;
use burn::tensor::{DType, Element, FloatDType, Shape, TensorData, bf16, f16};
use bytemuck::Pod;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The type of a model's weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    #[default]
    Fp32,
    /// 8 bits of exponent, as f32 has, and 8 of precision.
    Bf16,
    /// 5 bits of exponent and 11 of precision: gradients need a loss scale.
    Fp16,
}

impl Precision {
    /// Its name, as in Megatron's flags.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Fp32 => "fp32",
            Precision::Bf16 => "bf16",
            Precision::Fp16 => "fp16",
        }
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Precision::Fp32 => 4,
            Precision::Bf16 | Precision::Fp16 => 2,
        }
    }

    /// Burn's name for it.
    pub fn dtype(self) -> DType {
        self.float_dtype().into()
    }

    /// The same among float types.
    pub(crate) fn float_dtype(self) -> FloatDType {
        match self {
            Precision::Fp32 => FloatDType::F32,
            Precision::Bf16 => FloatDType::BF16,
            Precision::Fp16 => FloatDType::F16,
        }
    }

    /// The precision of a tensor.
    ///
    /// # Panics
    /// If it is none of these: no rank exchanges such tensors.
    pub(crate) fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Precision::Fp32,
            DType::BF16 => Precision::Bf16,
            DType::F16 => Precision::Fp16,
            other => panic!("ranks exchange tensors of f32, bf16 and f16, not of {other:?}"),
        }
    }

    /// Values as bytes of this type, rounded to it.
    pub(crate) fn encode(self, values: &[f32]) -> Cow<'_, [u8]> {
        fn narrowed<T: Pod>(values: &[f32], narrow: fn(f32) -> T) -> Cow<'static, [u8]> {
            let values: Vec<T> = values.iter().map(|value| narrow(*value)).collect();
            Cow::Owned(bytemuck::cast_slice(&values).to_vec())
        }
        match self {
            Precision::Fp32 => Cow::Borrowed(bytemuck::cast_slice(values)),
            Precision::Bf16 => narrowed(values, bf16::from_f32),
            Precision::Fp16 => narrowed(values, f16::from_f32),
        }
    }

    /// The way back.
    pub(crate) fn decode(self, bytes: &[u8], values: &mut [f32]) {
        fn widened<T: Pod>(bytes: &[u8], values: &mut [f32], widen: fn(T) -> f32) {
            let bytes = bytes.chunks_exact(size_of::<T>());
            for (value, bytes) in values.iter_mut().zip(bytes) {
                *value = widen(bytemuck::pod_read_unaligned(bytes));
            }
        }
        match self {
            Precision::Fp32 => widened(bytes, values, |value: f32| value),
            Precision::Bf16 => widened(bytes, values, bf16::to_f32),
            Precision::Fp16 => widened(bytes, values, f16::to_f32),
        }
    }

    /// A tensor's data from its bytes. They may lie anywhere, values only at multiples of their size: hence
    /// a copy.
    pub(crate) fn data(self, bytes: &[u8], shape: impl Into<Shape>) -> TensorData {
        fn of<T: Pod + Element>(bytes: &[u8], shape: Shape) -> TensorData {
            TensorData::new(bytemuck::pod_collect_to_vec::<u8, T>(bytes), shape)
        }
        let shape = shape.into();
        match self {
            Precision::Fp32 => of::<f32>(bytes, shape),
            Precision::Bf16 => of::<bf16>(bytes, shape),
            Precision::Fp16 => of::<f16>(bytes, shape),
        }
    }

    /// The values of a tensor's data, to be added up with other ranks'.
    ///
    /// # Panics
    /// If the data are of another type.
    pub(crate) fn values_mut(self, data: &mut TensorData) -> ValuesMut<'_> {
        const MATCHES: &str = "data of the tensor's type";
        match self {
            Precision::Fp32 => ValuesMut::F32(data.as_mut_slice().expect(MATCHES)),
            Precision::Bf16 => ValuesMut::Bf16(data.as_mut_slice().expect(MATCHES)),
            Precision::Fp16 => ValuesMut::F16(data.as_mut_slice().expect(MATCHES)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_travel_in_their_own_type() {
        let values = [1.0f32, -0.333_333_34, 1e-4, 65504.0];
        for (precision, error) in [
            (Precision::Fp32, 0.0),
            (Precision::Bf16, 2f32.powi(-9)),
            (Precision::Fp16, 2f32.powi(-11)),
        ] {
            let bytes = precision.encode(&values);
            assert_eq!(bytes.len(), values.len() * precision.bytes());
            let mut back = [0f32; 4];
            precision.decode(&bytes, &mut back);
            let data = precision.data(&bytes, [4]);
            assert_eq!(data.dtype(), precision.dtype());
            assert_eq!(data.iter::<f32>().collect::<Vec<_>>(), back);
            for (back, value) in back.iter().zip(values) {
                assert!(
                    (back - value).abs() <= error * value.abs(),
                    "{back} {value}"
                );
            }
            // What has been rounded once is not rounded again.
            assert_eq!(precision.encode(&back), bytes);
        }
    }
}
