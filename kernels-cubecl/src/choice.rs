//! Which kernels run.

use crate::Fused;
use burn::backend::Flex;
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
    /// Whether tensors of that type on that backend take fused kernels.
    pub fn fuse<B: Fused>(self, dtype: DType) -> bool {
        self != Kernels::Local && B::fuses(dtype)
    }

    /// Whether tensors of that type on that device do.
    pub fn fuse_on(self, device: &Device, dtype: DType) -> bool {
        let flex = *device == Device::flex() || *device == Device::flex().autodiff();
        self != Kernels::Local && flex && Flex::fuses(dtype)
    }
}
