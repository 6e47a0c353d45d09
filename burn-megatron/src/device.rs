//! What a rank computes on.

use crate::Violation;
use burn::tensor::Device;
use serde::{Deserialize, Serialize};
#[cfg(feature = "cuda")]
use std::path::PathBuf;

/// The kind of device that every rank's tensors lie on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RankDevice {
    /// The machine's cores, shared out among the ranks: Burn's Flex backend.
    #[default]
    Cpu,
    /// NVIDIA cards, one for each rank: CubeCL's kernels as CUDA C++, compiled at run time.
    Cuda,
    /// The best card that has a driver for Vulkan, Metal or DirectX, for all ranks.
    Wgpu,
}

impl RankDevice {
    pub fn name(self) -> &'static str {
        match self {
            RankDevice::Cpu => "cpu",
            RankDevice::Cuda => "cuda",
            RankDevice::Wgpu => "wgpu",
        }
    }

    /// The device of a rank. A kind that this build lacks is [refused](Self::violation) before.
    pub fn of_rank(self, rank: usize) -> Device {
        match self {
            #[cfg(feature = "cuda")]
            RankDevice::Cuda => Device::cuda(rank),
            #[cfg(feature = "wgpu")]
            RankDevice::Wgpu => {
                let _ = rank;
                Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)
            }
            _ => {
                let _ = rank;
                Device::flex()
            }
        }
    }

    /// Why ranks cannot run there: the build, or a library that is not there.
    pub fn violation(self) -> Option<Violation> {
        let built = match self {
            RankDevice::Cpu => true,
            RankDevice::Cuda => cfg!(feature = "cuda"),
            RankDevice::Wgpu => cfg!(feature = "wgpu"),
        };
        if !built {
            let name = self.name();
            let rule = format!(
                "device is {name}, but this program was built without it: build it with `--features {name}`"
            );
            return Some(Violation::new(rule, ["cpu"]));
        }
        #[cfg(feature = "cuda")]
        if self == RankDevice::Cuda {
            return missing_cuda_library().or_else(missing_cuda_headers);
        }
        None
    }
}

/// CUDA's libraries are opened at run time: the driver's, and the compiler's.
#[cfg(feature = "cuda")]
fn missing_cuda_library() -> Option<Violation> {
    let all = [
        ("the NVIDIA driver", ["libcuda.so.1", "libcuda.so"]),
        ("CUDA 12's NVRTC", ["libnvrtc.so.12", "libnvrtc.so"]),
    ];
    let missing = |names: &[&str; 2]| {
        // SAFETY: these libraries may be loaded by any program; this one will use them.
        let found = names
            .iter()
            .any(|name| unsafe { libloading::Library::new(*name) }.is_ok());
        !found
    };
    let (whose, names) = all.into_iter().find(|(_, names)| missing(names))?;
    let rule = format!(
        "device is cuda, but {} of {whose} cannot be opened: install it, or put its folder into LD_LIBRARY_PATH",
        names[0]
    );
    Some(Violation::new(rule, ["cpu"]))
}

/// Kernels are compiled with CUDA's headers, which CubeCL looks for in these places.
#[cfg(feature = "cuda")]
fn missing_cuda_headers() -> Option<Violation> {
    if cfg!(windows) {
        return None;
    }
    let folders = match std::env::var_os("CUDA_PATH") {
        Some(path) => vec![PathBuf::from(path)],
        None => ["/usr/local/cuda", "/opt/cuda", "/usr"]
            .map(PathBuf::from)
            .to_vec(),
    };
    let header = "include/cuda_bf16.h";
    if folders.iter().any(|folder| folder.join(header).is_file()) {
        return None;
    }
    let rule = format!(
        "device is cuda, but {} is not there: install CUDA's headers, or name their parent folder with CUDA_PATH",
        folders[0].join(header).display()
    );
    Some(Violation::new(rule, ["cpu"]))
}
