//! A rank's flat buffers: the elements of all its parameters, or those that it owns, one after another in f32.

use super::host_data;
use burn::tensor::{DType, Device, Slice, Tensor, TensorData};
use burn_megatron_kernels::flat::is_host;
use std::borrow::Cow;
use std::ops::Range;

/// Values of f32, where the rank computes: in the host's memory, or in that of its card.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a rank has a handful of them")]
pub enum FlatBuffer {
    Host(Vec<f32>),
    /// `[n]`, without a graph.
    Device(Tensor<1>),
}

impl Default for FlatBuffer {
    /// Without elements.
    fn default() -> Self {
        FlatBuffer::Host(Vec::new())
    }
}

impl FlatBuffer {
    /// These values, for computations on `device`.
    pub fn new(values: Vec<f32>, device: &Device) -> Self {
        match is_host(device) {
            true => FlatBuffer::Host(values),
            false => FlatBuffer::Device(upload(values, device)),
        }
    }

    /// Zeros.
    pub fn zeros(len: usize, device: &Device) -> Self {
        match is_host(device) {
            true => FlatBuffer::Host(vec![0.0; len]),
            false => {
                let options = (&device.clone().inner(), DType::F32);
                FlatBuffer::Device(Tensor::zeros([len], options))
            }
        }
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        match self {
            FlatBuffer::Host(values) => values.len(),
            FlatBuffer::Device(values) => values.dims()[0],
        }
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes all of them 0.
    pub fn clear(&mut self) {
        match self {
            FlatBuffer::Host(values) => values.fill(0.0),
            FlatBuffer::Device(values) => {
                // Freed first: there is not to be room for two.
                let (len, device) = (values.dims()[0], values.device());
                *values = Tensor::empty([0], (&device, DType::F32));
                *values = Tensor::zeros([len], (&device, DType::F32));
            }
        }
    }

    /// Its values on the host.
    pub fn host(&self) -> Cow<'_, [f32]> {
        self.part(0..self.len())
    }

    /// Some of its values on the host.
    pub fn part(&self, range: Range<usize>) -> Cow<'_, [f32]> {
        match self {
            FlatBuffer::Host(values) => Cow::Borrowed(&values[range]),
            FlatBuffer::Device(values) => Cow::Owned(download(slice(values, range))),
        }
    }

    /// Its values on the host, whose memory is given up here.
    pub fn into_host(self) -> Vec<f32> {
        match self {
            FlatBuffer::Host(values) => values,
            FlatBuffer::Device(values) => download(values),
        }
    }

    /// Changes some of its values on the host.
    pub fn change<T>(&mut self, range: Range<usize>, change: impl FnOnce(&mut [f32]) -> T) -> T {
        match self {
            FlatBuffer::Host(values) => change(&mut values[range]),
            FlatBuffer::Device(values) => {
                let mut part = download(slice(values, range.clone()));
                let result = change(&mut part);
                let part = upload(part, &values.device());
                *values = match range.len() == values.dims()[0] {
                    true => part,
                    false => values.clone().slice_assign([Slice::from(range)], part),
                };
                result
            }
        }
    }

    /// Some of its values on the device that has them.
    pub(crate) fn slices(&self, ranges: &[Range<usize>]) -> FlatBuffer {
        match (self, ranges) {
            (FlatBuffer::Host(values), ranges) => {
                let parts = ranges.iter().map(|range| &values[range.clone()]);
                FlatBuffer::Host(parts.flatten().copied().collect())
            }
            (FlatBuffer::Device(values), [range]) => {
                FlatBuffer::Device(slice(values, range.clone()))
            }
            (FlatBuffer::Device(values), ranges) => {
                let parts = ranges.iter().map(|range| slice(values, range.clone()));
                FlatBuffer::Device(Tensor::cat(parts.collect(), 0))
            }
        }
    }
}

/// Some of a tensor's values; itself, if they are all.
pub(crate) fn slice(values: &Tensor<1>, range: Range<usize>) -> Tensor<1> {
    match range == (0..values.dims()[0]) {
        true => values.clone(),
        false => values.clone().slice([Slice::from(range)]),
    }
}

pub(crate) fn upload(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let len = values.len();
    let data = TensorData::new(values, [len]);
    Tensor::from_data(data, (&device.clone().inner(), DType::F32))
}

/// On the host, without a copy where nobody else holds them.
fn download(values: Tensor<1>) -> Vec<f32> {
    host_data(values).try_into_vec().expect("the tensor is f32")
}
