//! The kernels for tensor cores, as they are written for NVIDIA cards, run on the CPU (`cuda_on_cpu.h`) and compared with
//! the reference in f64.

use super::super::catalog::{Architecture, kernels};
use crate::Kernels;
use crate::attention::{AttentionOptions, causal_attention};
use crate::dropout::{AttentionDropout, AttentionHeads, Keep};
use crate::tests::{arbitrary, distance};
use burn::tensor::{DType, Device, Tensor, TensorData};
use libloading::Library;
use std::ffi::c_void;
use std::process::Command;

const SHIM: &str = include_str!("cuda_on_cpu.h");

/// A kernel, compiled for this machine.
struct Kernel {
    library: Library,
    shared_bytes: u32,
}

/// Buffers, what `info_st` holds, the grid and the block, and bytes of shared memory.
type Run = unsafe extern "C" fn(*const *mut c_void, *const c_void, *const u32, *const u32, u32);

/// PTX of inline assembly to calls of what emulates it.
fn emulated(source: &str) -> String {
    let mut parts = source.split("asm volatile(");
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let (statement, rest) = part.split_once(");").expect("the end of a statement");
        let (_, text) = statement.split_once('"').expect("its text");
        let (text, operands) = text.split_once('"').expect("the text's end");
        let operation = match text {
            t if t.starts_with("mma.sync.aligned.m16n8k16.row.col.f32.bf16") => {
                "mma<__nv_bfloat16>"
            }
            t if t.starts_with("mma.sync.aligned.m16n8k16.row.col.f32.f16") => "mma<__half>",
            t if t.starts_with("ldmatrix.sync.aligned.m8n8.x4.trans") => "ldmatrix<true>",
            t if t.starts_with("ldmatrix.sync.aligned.m8n8.x4") => "ldmatrix<false>",
            t if t.starts_with("ex2.approx.ftz.f32") => "power_of_two",
            t if t.starts_with("cp.async.cg") => "copy",
            t if t.starts_with("cp.async.commit_group") => "commit",
            t if t.starts_with("cp.async.wait_group 0") => "wait",
            other => panic!("no emulation of {other}"),
        };
        // Operands stand in parentheses, after their constraints.
        let operands = operands
            .split('"')
            .filter_map(|text| text.strip_prefix('('));
        let operands: Vec<&str> = operands
            .filter_map(|text| Some(text.rsplit_once(')')?.0))
            .collect();
        out += &format!("emulated::{operation}({});{rest}", operands.join(", "));
    }
    out
}

impl Kernel {
    fn compile(name: &str, folder: &std::path::Path) -> Self {
        let entry = kernels().into_iter().find(|entry| entry.name == name);
        let entry = entry.unwrap_or_else(|| panic!("no kernel is named {name}"));
        let source = entry.source(Architecture(80)).expect("CUDA C++");
        let text = emulated(&source.text);
        let text: Vec<&str> = text
            .lines()
            .filter(|line| !line.starts_with("#include"))
            .collect();
        let text = text.join("\n");
        let (before, after) = text
            .split_once("extern __shared__ __align__(16) char ")
            .expect("shared memory");
        let (shared, after) = after.split_once("[];").expect("its name");
        let text = format!("{before}char *const {shared} = emulated::shared;{after}");
        let (_, signature) = text.split_once("__launch_bounds__(128)").expect("a kernel");
        let (function, parameters) = signature.split_once('(').expect("parameters");
        let (parameters, _) = parameters.split_once(')').expect("their end");
        let buffers = parameters.split(',').count() - 1;
        let arguments: Vec<String> = (parameters.split(',').take(buffers).enumerate())
            .map(|(i, parameter)| {
                let (kind, _) = parameter.rsplit_once(' ').expect("a type and a name");
                format!("({})buffers[{i}]", kind.replace("__restrict__", ""))
            })
            .collect();
        let text = format!(
            "{SHIM}\n{text}\n
            static void **buffers;
            static const info_st *info;
            static void call() {{ {function}({}, *info); }}
            extern \"C\" void run(void **b, const void *i, const unsigned *grid, const unsigned *block,
                                unsigned shared_bytes) {{
                buffers = b;
                info = (const info_st *)i;
                gridDim = {{grid[0], grid[1], 1}};
                blockDim = {{block[0], block[1], 1}};
                emulated::body = call;
                for (unsigned y = 0; y < grid[1]; ++y)
                    for (unsigned x = 0; x < grid[0]; ++x) {{
                        blockIdx = {{x, y, 0}};
                        emulated::run_block(shared_bytes);
                    }}
            }}",
            arguments.join(", ")
        );
        let file = folder.join(name.replace(' ', "_"));
        let (source_file, library) = (file.with_extension("cpp"), file.with_extension("so"));
        std::fs::write(&source_file, text).expect("a file");
        let mut compiler = Command::new("g++");
        compiler.args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o"]);
        let output = compiler.arg(&library).arg(&source_file).output();
        let output = output.expect("g++ is installed");
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {log}");
        // SAFETY: the library was compiled above, and does nothing when it is loaded.
        let library = unsafe { Library::new(&library) }.expect("a library");
        Kernel {
            library,
            shared_bytes: source.shared_bytes as u32,
        }
    }

    fn run(&self, buffers: &[*mut c_void], info: &Info, grid: [u32; 2]) {
        // SAFETY: the function is the one that was compiled, and has these parameters; buffers are as long as the
        // kernel's launch makes them.
        unsafe {
            let run = self.library.get::<Run>(b"run").expect("the function");
            let info = std::ptr::from_ref(info).cast();
            run(
                buffers.as_ptr(),
                info,
                grid.as_ptr(),
                [32, 4].as_ptr(),
                self.shared_bytes,
            );
        }
    }
}

/// `info_st` of the attention's kernels.
#[repr(C)]
struct Info {
    sizes: [u32; 4],
    scales: [f32; 2],
    words: [u32; 10],
    rest: [u32; 16],
}

#[derive(Clone, Copy)]
struct Case {
    dtype: DType,
    bound: f64,
    d: usize,
    s: usize,
    n: usize,
    r: usize,
    p: f64,
}

/// Values rounded to a type: its bits, and what they are.
fn rounded(values: &[f32], dtype: DType) -> (Vec<u16>, Vec<f32>) {
    let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype);
    let bits = data
        .as_bytes()
        .chunks(2)
        .map(|b| u16::from_le_bytes([b[0], b[1]]));
    (bits.collect(), data.iter::<f32>().collect())
}

fn values(bits: &[u16], dtype: DType) -> Vec<f64> {
    let of_bits = |bits: &u16| match dtype {
        DType::BF16 => f64::from(f32::from_bits(u32::from(*bits) << 16)),
        _ => f64::from(burn::tensor::f16::from_bits(*bits).to_f32()),
    };
    bits.iter().map(of_bits).collect()
}

fn check(case: Case, folder: &std::path::Path) {
    let Case {
        dtype,
        bound,
        d,
        s,
        n,
        r,
        p,
    } = case;
    let dropout = (p > 0.0).then(|| AttentionDropout {
        keep: Keep::new(p, 3, 4),
        first_sample: 2,
        heads: AttentionHeads {
            groups: n,
            first_group: 1,
            queries_per_group: r,
            num_attention_heads: (n + 1) * r,
        },
    });
    let options = AttentionOptions {
        queries_per_group: r,
        head_width: d,
        scale: 1.0 / (d as f64).sqrt(),
        dropout,
        recompute: false,
    };
    let (width, heads) = ((r + 2) * d, n * r);
    let (qkv, exact_qkv) = rounded(&arbitrary([s, n, width], 1), dtype);
    let (d_out, exact_d_out) = rounded(&arbitrary([s, n, r * d], 2), dtype);

    let device = Device::flex().autodiff();
    let tensor = |values: &[f32], shape: [usize; 3]| -> Tensor<3> {
        let data = TensorData::new(values.to_vec(), shape).convert_dtype(DType::F64);
        Tensor::from_data(data, (&device, DType::F64))
    };
    let x = tensor(&exact_qkv, [s, n, width]).require_grad();
    let y = causal_attention(x.clone(), options, Kernels::Local);
    let weighted = y.clone() * tensor(&exact_d_out, [s, n, r * d]);
    let gradients = weighted.sum().backward();
    let host = |x: Tensor<3>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    let (want, want_gradient) = (
        host(y.inner()),
        host(x.grad(&gradients).expect("a gradient")),
    );

    let ([k0, k1], [s0, s1], below, kept) = match dropout {
        Some(dropout) => dropout.keep.words(),
        None => ([0; 2], [0; 2], 0, 1.0),
    };
    let info = Info {
        sizes: [s as u32, n as u32, r as u32, 0],
        scales: [kept, options.scale as f32],
        words: [
            k0,
            k1,
            s0,
            s1,
            below,
            2,
            n as u32,
            1,
            ((n + 1) * r) as u32,
            0,
        ],
        rest: [0; 16],
    };
    let type_name = if dtype == DType::BF16 { "bf16" } else { "f16" };
    let kind = format!("d {d}{} {type_name}", if p > 0.0 { " dropout" } else { "" });
    let kernel = |which: &str| Kernel::compile(&format!("attention_{which} {kind}"), folder);
    // Not a number, wherever nothing is written.
    let mut out = vec![u16::MAX; s * heads * d];
    let mut lse = vec![f32::NAN; heads * s];
    fn pointer<T>(values: &[T]) -> *mut c_void {
        values.as_ptr().cast_mut().cast()
    }
    fn pointer_mut<T>(values: &mut [T]) -> *mut c_void {
        values.as_mut_ptr().cast()
    }
    let blocks = |rows: usize| s.div_ceil(rows) as u32;
    let tile = super::mma::Tile::forward(d, p > 0.0);
    let buffers = [pointer(&qkv), pointer_mut(&mut out), pointer_mut(&mut lse)];
    kernel("forward").run(&buffers, &info, [blocks(tile.rows()), heads as u32]);
    let got = values(&out, dtype);
    let error = distance(&got, &want);
    assert!(error < bound, "{kind}, s {s}: the output is {error:e} off");

    let mut delta = vec![0f32; heads * s];
    for (i, (out, d_out)) in got.iter().zip(&exact_d_out).enumerate() {
        let (position, head) = (i / d / heads, i / d % heads);
        delta[head * s + position] += *out as f32 * d_out;
    }
    let mut d_qkv = vec![u16::MAX; s * n * width];
    let buffers = [
        pointer(&qkv),
        pointer(&d_out),
        pointer(&lse),
        pointer(&delta),
        pointer_mut(&mut d_qkv),
    ];
    let tile = super::mma::Tile::queries(d, p > 0.0);
    kernel("d_queries").run(&buffers, &info, [blocks(tile.rows()), heads as u32]);
    let tile = super::mma::Tile::keys(d, p > 0.0);
    kernel("d_keys").run(&buffers, &info, [blocks(tile.rows()), n as u32]);
    let error = distance(&values(&d_qkv, dtype), &want_gradient);
    assert!(
        error < bound,
        "{kind}, s {s}: the gradient is {error:e} off"
    );
}

/// Sequences within a tile, at its edge and beyond; grouped queries; two samples' worth of groups.
#[test]
fn tensor_core_attention_is_the_reference() {
    let folder = tempfile::tempdir().expect("a folder");
    for (dtype, d, s, n, r, p) in [
        (DType::BF16, 64, 66, 1, 3, 0.2),
        (DType::BF16, 64, 150, 2, 1, 0.0),
        (DType::F16, 128, 129, 1, 2, 0.0),
    ] {
        let bound = if dtype == DType::BF16 { 1e-2 } else { 2e-3 };
        check(
            Case {
                dtype,
                bound,
                d,
                s,
                n,
                r,
                p,
            },
            folder.path(),
        );
    }
}
