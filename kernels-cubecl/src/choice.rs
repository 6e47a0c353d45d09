//! Which kernels run.

use crate::Fused;
use burn::backend::tensor::FloatTensor;
use burn::backend::{DispatchDevice, Flex, TensorMetadata};
use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};

/// Which of an operation's two forms runs, under the name of Megatron's flag `--transformer-impl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kernels {
    /// Fused kernels where the device has them for the type, the reference elsewhere.
    #[default]
    Auto,
    /// Fused kernels; a device or a type without them is an error at the start.
    Fused,
    /// The reference.
    Local,
}

impl Kernels {
    /// Whether an operation of `x` takes fused kernels.
    pub fn fuse<B: Fused>(self, x: &FloatTensor<B>) -> bool {
        self != Kernels::Local && B::fuses(&x.device(), x.dtype())
    }

    /// Whether tensors of that type on that device do.
    pub fn fuse_on(self, device: &Device, dtype: DType) -> bool {
        let fuses = match device.clone().inner().as_dispatch() {
            DispatchDevice::Flex(device) => Flex::fuses(device, dtype),
            #[cfg(any(feature = "cuda", feature = "wgpu", feature = "cpu"))]
            DispatchDevice::Cube(device) => burn::backend::Cube::fuses(device, dtype),
            _ => false,
        };
        self != Kernels::Local && fuses
    }
}
