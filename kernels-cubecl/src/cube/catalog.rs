//! Every kernel as it is compiled for an NVIDIA card, at the sizes of a large model: for checks where there is none.

use cubecl::cmma::MatrixLayout;
use cubecl::ir::features::Plane;
use cubecl::ir::{
    AddressType, ContiguousElements, DeviceIdentity, DeviceProperties, ElemType, FloatKind,
    HardwareProperties, MemoryDeviceProperties, MmaProperties, TargetProperties, VectorSize,
};
use cubecl::prelude::*;
use cubecl_cpp::cuda;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaCmmaCompiler;
use cubecl_cpp::cuda::mma::manual::contiguous_elements_cuda;
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features,
    register_wmma_features,
};
use cubecl_cpp::target::Cuda;
use std::sync::Arc;

/// A card's compute capability: 80 is Ampere, 90 Hopper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Architecture(pub u32);

/// A kernel with all that is fixed when it is compiled.
#[derive(Clone)]
pub struct Entry {
    pub name: String,
    /// It may use so many for each thread.
    pub registers: usize,
    /// Whether its products are to run on tensor cores.
    pub tensor_cores: bool,
    make: Make,
}

type Make = Arc<dyn Fn(Target) -> Box<dyn CubeKernel> + Send + Sync>;

/// What a kernel is compiled for.
#[derive(Clone)]
pub struct Target {
    pub device: Arc<DeviceProperties>,
    pub properties: Arc<TargetProperties>,
    options: CompilationOptions,
}

/// CUDA C++ of a kernel.
pub struct Source {
    pub text: String,
    pub shared_bytes: usize,
}

/// The types that kernels are compiled for, and elements of a 16-byte load of each.
pub const TYPES: [(&str, ElemType, usize); 3] = [
    ("bf16", ElemType::Float(FloatKind::BF16), 8),
    ("f16", ElemType::Float(FloatKind::F16), 8),
    ("f32", ElemType::Float(FloatKind::F32), 4),
];

/// All of them.
pub fn kernels() -> Vec<Entry> {
    let mut all = Vec::new();
    super::norm::catalog(&mut all);
    super::activation::catalog(&mut all);
    super::dropout::catalog(&mut all);
    super::embedding::catalog(&mut all);
    super::rotary::catalog(&mut all);
    super::sum::catalog(&mut all);
    super::head::catalog(&mut all);
    super::flat::catalog(&mut all);
    super::attention::catalog(&mut all);
    all
}

impl Entry {
    pub fn new(
        name: String,
        registers: usize,
        make: impl Fn(Target) -> Box<dyn CubeKernel> + Send + Sync + 'static,
    ) -> Self {
        Entry {
            name,
            registers,
            tensor_cores: false,
            make: Arc::new(make),
        }
    }

    pub fn on_tensor_cores(mut self) -> Self {
        self.tensor_cores = true;
        self
    }

    /// # Errors
    /// What CubeCL says of a kernel that it cannot write.
    pub fn source(&self, architecture: Architecture) -> Result<Source, String> {
        let target = Target::new(architecture);
        let options = target.options;
        let definition = cubecl::define_kernel(&*(self.make)(target));
        let definition = definition.map_err(|e| format!("{e:?}"))?;
        let mut compiler = CppCompiler::<Cuda>::default();
        let compiled = cubecl::Compiler::compile(&mut compiler, definition, &options);
        let compiled = compiled.map_err(|e| format!("{e:?}"))?;
        Ok(Source {
            text: compiled.to_string(),
            shared_bytes: compiled.shared_memory_size as usize,
        })
    }
}

/// A buffer, in a kernel's compilation.
pub fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

impl Target {
    /// What CubeCL's runtime finds on such a card.
    fn new(Architecture(version): Architecture) -> Self {
        let hardware = HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: if version >= 90 { 227 } else { 163 } * 1024,
            max_cube_count: (i32::MAX as u32, 65535, 65535),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(if version >= 90 { 132 } else { 108 }),
            num_tensor_cores: Some(4),
            min_tensor_cores_dim: Some(8),
            num_cpu_cores: None,
            last_level_cache_size: None,
            max_vector_size: VectorSize::MAX,
            cube_mma_reserved_shared_memory: 0,
        };
        let identity = DeviceIdentity {
            name: format!("sm_{version}"),
            fingerprint: format!("sm_{version}"),
            physical: None,
        };
        let mut device = DeviceProperties::new(
            Default::default(),
            MemoryDeviceProperties::new(80 << 30, 512),
            hardware,
            cubecl::profile::TimingMethod::Device,
            identity,
        );
        register_supported_types(&mut device);
        for feature in [Plane::Ops, Plane::Sync, Plane::NonUniformControlFlow] {
            device.features.plane.insert(feature);
        }
        device.features.memory_reinterpret = true;
        device.features.alignment = true;
        device.features.copy_async = true;
        let architecture = CudaArchitecture {
            version,
            tensor_cores: true,
        };
        let cmma = CudaCmmaCompiler::Cpp.supported_cmma_combinations(&architecture);
        register_wmma_features(cmma, &mut device);
        register_mma_features(cuda::supported_mma_combinations(&architecture), &mut device);
        let properties = TargetProperties {
            mma: MmaProperties {
                register_size_bits: 32,
                const_plane_size: 32,
                register_layout_a: MatrixLayout::RowMajor,
                register_layout_b: MatrixLayout::ColMajor,
                register_layout_acc: MatrixLayout::RowMajor,
                register_duplication_a: 1,
                register_duplication_b: 1,
                register_duplication_acc: 1,
                contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
            },
        };
        let options = CompilationOptions {
            warp_size: 32,
            supports_features: CppSupportedFeatures {
                fast_math: true,
                dp4a: true,
                grid_constants: true,
                clusters: version >= 90,
                elect_sync: version >= 90,
                fast_tanh: true,
            },
            amd_wmma: None,
        };
        Target {
            device: Arc::new(device),
            properties: Arc::new(properties),
            options,
        }
    }
}

/// Settings of cubes of so many units, over tensors of less than 2³² elements.
pub fn settings(units: CubeDim) -> KernelSettings {
    KernelSettings::new(*units, ExecutionMode::Unchecked, AddressType::U32)
}
