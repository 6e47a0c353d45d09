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

    /// Whether tensors lie in the host's memory.
    pub fn is_host(self) -> bool {
        self == RankDevice::Cpu
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

    /// Why so many ranks cannot run there: the build, something that is not installed, or too few cards.
    pub fn violation(self, ranks: usize) -> Option<Violation> {
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
            return missing_cuda_library()
                .or_else(missing_cuda_headers)
                .or_else(|| missing_cards(ranks));
        }
        let _ = ranks;
        None
    }
}

/// CUDA's libraries are opened at run time: the driver's, and the compiler's.
#[cfg(feature = "cuda")]
fn missing_cuda_library() -> Option<Violation> {
    let all = [
        ("the NVIDIA driver", DRIVER),
        ("CUDA 12's NVRTC", ["libnvrtc.so.12", "libnvrtc.so"]),
    ];
    let (whose, names) = all.into_iter().find(|(_, names)| opened(names).is_none())?;
    let rule = format!(
        "device is cuda, but {} of {whose} cannot be opened: install it, or put its folder into LD_LIBRARY_PATH",
        names[0]
    );
    Some(Violation::new(rule, ["cpu"]))
}

#[cfg(feature = "cuda")]
const DRIVER: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

#[cfg(feature = "cuda")]
fn opened(names: &[&str; 2]) -> Option<libloading::Library> {
    // SAFETY: these are CUDA's libraries, which any program may load; this one will use them.
    let mut found = names
        .iter()
        .filter_map(|name| unsafe { libloading::Library::new(*name) }.ok());
    found.next()
}

/// Each rank takes a card of its own.
#[cfg(feature = "cuda")]
fn missing_cards(ranks: usize) -> Option<Violation> {
    type Init = unsafe extern "C" fn(flags: u32) -> i32;
    type Count = unsafe extern "C" fn(count: *mut i32) -> i32;
    let driver = opened(&DRIVER)?;
    let mut cards = 0;
    // SAFETY: the functions have these types in every version of the driver, and `cards` outlives the call.
    let outcome = unsafe {
        let (init, count) = (
            driver.get::<Init>(b"cuInit").ok()?,
            driver.get::<Count>(b"cuDeviceGetCount").ok()?,
        );
        match init(0) {
            0 => count(&mut cards),
            failed => failed,
        }
    };
    let cards = usize::try_from(cards).unwrap_or(0);
    if outcome == 0 && cards >= ranks {
        return None;
    }
    let (rule, nearest) = match outcome {
        0 => (
            format!(
                "device is cuda and {ranks} ranks take a card each, but this machine has {cards}"
            ),
            format!("{cards} ranks"),
        ),
        code => (
            format!("device is cuda, but the driver finds no card (error {code})"),
            "cpu".into(),
        ),
    };
    Some(Violation::new(rule, [nearest]))
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
