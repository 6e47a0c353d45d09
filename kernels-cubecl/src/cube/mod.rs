//! The fused kernels in CubeCL, over tensors of Burn's backend for GPUs. Inputs and outputs have the tensors' type;
//! arithmetic is in f32. Results do not depend on the device's load: sums over rows are added up in parts of fixed
//! size, and nothing is added atomically.

mod activation;
mod attention;
mod dropout;
mod embedding;
mod flat;
mod fusion;
mod head;
mod norm;
mod rotary;
mod sum;

#[cfg(feature = "ptx")]
pub mod catalog;

use crate::Fused;
use crate::adamw::AdamWFactors;
use crate::attention::AttentionOptions;
use crate::dropout::HiddenKeep;
use crate::flat::{Part, Ranges};
use crate::gelu::GeluApproximation;
use crate::head_loss::{HeadLoss, HeadShard};
use crate::rotary::{Heads, RotaryTable};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape, Slice};
use burn_cubecl::kernel::into_contiguous;
#[cfg(not(test))]
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::client::Client;
use cubecl::features::{Plane, TypeUsage};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use std::ops::Range;
use std::sync::OnceLock;

impl Fused for CubeBackend {
    fn fuses(device: &CubeDevice, dtype: DType) -> bool {
        fuses(device, dtype)
    }

    fn fused_layer_norm(
        x: CubeTensor,
        weight: CubeTensor,
        bias: CubeTensor,
        epsilon: f64,
    ) -> (CubeTensor, CubeTensor) {
        norm::layer_norm(x, weight, bias, epsilon as f32)
    }

    fn fused_layer_norm_backward(
        x: CubeTensor,
        stats: CubeTensor,
        weight: CubeTensor,
        dy: CubeTensor,
        so_far: Option<CubeTensor>,
    ) -> [CubeTensor; 3] {
        norm::layer_norm_backward(x, stats, weight, dy, so_far)
    }

    fn fused_rms_norm(x: CubeTensor, weight: CubeTensor, epsilon: f64) -> (CubeTensor, CubeTensor) {
        norm::rms_norm(x, weight, epsilon as f32)
    }

    fn fused_rms_norm_backward(
        x: CubeTensor,
        scale: CubeTensor,
        weight: CubeTensor,
        dy: CubeTensor,
        so_far: Option<CubeTensor>,
    ) -> [CubeTensor; 2] {
        norm::rms_norm_backward(x, scale, weight, dy, so_far)
    }

    fn fused_added_norm(
        x: CubeTensor,
        residual: CubeTensor,
        weight: CubeTensor,
        bias: Option<CubeTensor>,
        epsilon: f64,
    ) -> [CubeTensor; 3] {
        norm::added_norm(x, residual, weight, bias, epsilon as f32)
    }

    fn fused_dropout_add(
        x: CubeTensor,
        residual: Option<CubeTensor>,
        keep: &HiddenKeep,
    ) -> CubeTensor {
        dropout::dropout_add(x, residual, keep)
    }

    fn fused_gelu(x: CubeTensor, bias: Option<CubeTensor>, how: GeluApproximation) -> CubeTensor {
        activation::gelu(x, bias, how)
    }

    fn fused_gelu_backward(
        x: CubeTensor,
        bias: Option<CubeTensor>,
        how: GeluApproximation,
        dy: CubeTensor,
    ) -> (CubeTensor, Option<CubeTensor>) {
        activation::gelu_backward(x, bias, how, dy)
    }

    fn fused_swiglu(x: CubeTensor) -> CubeTensor {
        activation::swiglu(x)
    }

    fn fused_swiglu_backward(x: CubeTensor, dy: CubeTensor) -> CubeTensor {
        activation::swiglu_backward(x, dy)
    }

    fn fused_rotary(x: CubeTensor, heads: Heads, table: &RotaryTable, back: bool) -> CubeTensor {
        rotary::rotary(x, heads, table, back)
    }

    fn fused_attention(qkv: CubeTensor, options: &AttentionOptions) -> (CubeTensor, CubeTensor) {
        attention::forward(qkv, options)
    }

    fn fused_attention_backward(
        qkv: CubeTensor,
        out: CubeTensor,
        lse: CubeTensor,
        options: &AttentionOptions,
        d_out: CubeTensor,
    ) -> CubeTensor {
        attention::backward(qkv, out, lse, options, d_out)
    }

    fn fused_add_rows_at(table: CubeTensor, index: CubeTensor, dy: CubeTensor) -> CubeTensor {
        embedding::add_rows_at(table, index, dy)
    }

    fn fused_column_sums(x: CubeTensor) -> CubeTensor {
        sum::column_sums(x)
    }

    fn fused_gather(sums: CubeTensor, parts: Vec<Part<CubeTensor>>) -> CubeTensor {
        flat::gather(sums, parts)
    }

    fn fused_scatter(flat: CubeTensor, ranges: &[Range<usize>]) -> Vec<CubeTensor> {
        flat::scatter(flat, ranges)
    }

    fn fused_adamw(
        state: [CubeTensor; 3],
        gradients: CubeTensor,
        factors: &AdamWFactors,
        decayed: &Ranges,
        dtype: DType,
    ) -> ([CubeTensor; 3], CubeTensor) {
        flat::adamw(state, gradients, factors, decayed, dtype)
    }

    fn fused_square_sum(x: CubeTensor) -> CubeTensor {
        flat::square_sum(x)
    }

    fn fused_head_loss(
        hidden: CubeTensor,
        weight: CubeTensor,
        shard: &HeadShard<'_>,
        gradients: bool,
    ) -> HeadLoss<Self> {
        head::head_loss(hidden, weight, shard, gradients)
    }
}

fn fuses(device: &CubeDevice, dtype: DType) -> bool {
    match dtype {
        DType::F32 => true,
        // A kernel of a type that the device lacks fails where nobody sees it.
        DType::BF16 | DType::F16 => {
            let usage = device
                .client()
                .properties()
                .type_usage(dtype_to_elem_type(dtype));
            usage.contains(TypeUsage::Conversion) && usage.contains(TypeUsage::Buffer)
        }
        _ => false,
    }
}

/// Threads of a cube at most, and whether its kernels add up with plane operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Units {
    most: usize,
    planes: bool,
}

impl Units {
    fn of(client: &Client) -> Self {
        let hardware = &client.properties().hardware;
        // On a CPU runtime a cube's units are threads that wait for one another.
        let most = match hardware.plane_size_max {
            0 | 1 => 1,
            _ => (hardware.max_units_per_cube as usize).min(1024),
        };
        let alike = hardware.plane_size_min == hardware.plane_size_max && most > 1;
        let planes = match planes_wanted() {
            Some(wanted) => wanted,
            None => client.properties().features.plane.contains(Plane::Ops),
        };
        Units {
            most,
            planes: planes && alike,
        }
    }

    /// A power of two for `work` pieces of work: at least a plane's, at most `most` of a cube's.
    fn for_work(self, work: usize, most: usize) -> usize {
        work.next_power_of_two().max(32).min(most).min(self.most)
    }
}

/// `BURN_MEGATRON_PLANES=on|off` overrules what the device says of its plane operations: for tests and measurements.
fn planes_wanted() -> Option<bool> {
    static WANTED: OnceLock<Option<bool>> = OnceLock::new();
    *WANTED.get_or_init(
        || match std::env::var("BURN_MEGATRON_PLANES").ok()?.as_str() {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        },
    )
}

#[cfg(all(test, feature = "wgpu"))]
#[test]
fn plane_operations_are_used_as_asked() {
    let client = CubeDevice::Wgpu(Default::default()).client();
    let offered = client.properties().features.plane.contains(Plane::Ops);
    let used = Units::of(&client).planes;
    assert_eq!(used, planes_wanted().unwrap_or(offered));
}

fn contiguous(x: CubeTensor) -> CubeTensor {
    into_contiguous(x)
}

fn elem(x: &CubeTensor) -> ElemType {
    dtype_to_elem_type(x.dtype)
}

/// A tensor like `x` but for its shape and type, whose values are yet to be written.
fn empty(x: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let (client, device) = (x.client.clone(), x.device.clone());
    // In tests, what a kernel leaves unwritten is seen.
    #[cfg(test)]
    return burn_cubecl::ops::numeric::full_device_dtype(
        client,
        shape.into(),
        device,
        InputScalar::new(f32::NAN, dtype_to_elem_type(dtype)),
        dtype,
    );
    #[cfg(not(test))]
    empty_device_contiguous_dtype(client, device, shape.into(), dtype)
}

fn empty_like(x: &CubeTensor) -> CubeTensor {
    empty(x, x.shape(), x.dtype)
}

/// `[.., n]` as rows of `n`.
fn rows_of(x: &CubeTensor) -> (usize, usize) {
    let shape = x.shape();
    let n = crate::width(&shape);
    (shape.num_elements() / n.max(1), n)
}

/// Elements of the widest load that divides all of `widths`.
fn vector_size(x: &CubeTensor, widths: &[usize]) -> usize {
    let sizes = x.client.io_optimized_vector_sizes(x.dtype.size());
    let mut sizes = sizes.filter(|v| widths.iter().all(|w| w % v == 0));
    sizes.next().unwrap_or(1)
}

/// The indices' type that reaches every element of these.
fn addresses(tensors: &[&CubeTensor]) -> AddressType {
    let types = tensors.iter().map(|x| x.required_address_type());
    types.max().unwrap_or_default()
}

/// `cubes` or more of them, in as many dimensions as the device asks for: kernels take `CUBE_POS` and a bound.
fn cubes(client: &Client, cubes: usize) -> CubeCount {
    let most = client.properties().hardware.max_cube_count.0 as usize;
    let rows = cubes.div_ceil(most).max(1);
    CubeCount::Static(cubes.div_ceil(rows) as u32, rows as u32, 1)
}

/// `x`, or a copy where somebody else holds it: to be changed in place.
fn owned(x: CubeTensor) -> CubeTensor {
    let x = contiguous(x);
    if x.can_mut() { x } else { x.copy() }
}

/// Units of a cube where each goes its own way.
const UNITS: usize = 256;

/// A unit for each piece of `work`: kernels take `ABSOLUTE_POS` and a bound.
fn unit_each(client: &Client, work: usize) -> (CubeCount, CubeDim) {
    let units = Units::of(client).for_work(work, UNITS);
    let count = cubes(client, work.div_ceil(units));
    (count, CubeDim::new_1d(units as u32))
}

fn reshaped(x: CubeTensor, shape: impl Into<Shape>) -> CubeTensor {
    CubeBackend::float_reshape(x, shape.into())
}

/// Row `i` of a matrix of rows of `n`.
fn row(x: &CubeTensor, i: usize, n: usize) -> CubeTensor {
    let slices = [Slice::from(i..i + 1), Slice::from(0..n)];
    let row = CubeBackend::float_slice(x.clone(), &slices);
    reshaped(contiguous(row), [n])
}
