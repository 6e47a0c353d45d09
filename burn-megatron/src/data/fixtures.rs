//! Reading the reference fixtures in tests.

use std::path::PathBuf;

use safetensors::SafeTensors;

/// The path of a fixture file.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/")).join(name)
}

/// A fixture's JSON.
pub fn json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

/// The tensors of one safetensors fixture.
pub struct Tensors(Vec<u8>);

impl Tensors {
    pub fn read(name: &str) -> Self {
        Tensors(std::fs::read(path(name)).unwrap())
    }

    /// An integer tensor (i32 or i64), flattened, with its shape.
    pub fn ints(&self, name: &str) -> (Vec<i64>, Vec<usize>) {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap();
        let data = tensor.data();
        let values = match tensor.dtype() {
            safetensors::Dtype::I32 => chunks(data, |b| i32::from_le_bytes(b).into()),
            safetensors::Dtype::I64 => chunks(data, i64::from_le_bytes),
            other => panic!("{name} is {other:?}"),
        };
        (values, tensor.shape().to_vec())
    }

    /// An f32 tensor, flattened.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        chunks(file.tensor(name).unwrap().data(), f32::from_le_bytes)
    }
}

fn chunks<const N: usize, T>(data: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    data.chunks_exact(N)
        .map(|b| read(b.try_into().unwrap()))
        .collect()
}
