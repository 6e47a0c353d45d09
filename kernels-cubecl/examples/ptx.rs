//! Compiles every CubeCL kernel for NVIDIA cards where there is none: to CUDA C++ as in training, to PTX by NVRTC, and
//! to machine code by `ptxas`, which counts registers. Fails where one spills, needs more registers than it may, or
//! should use tensor cores and does not.
//!
//! `scripts/kernels_without_a_gpu.sh` provides the compilers and runs it. By hand:
//! `ptx <ptxas> <include folders, separated by colons> <folder for sources and PTX> [part of the kernels' names]`, with
//! `libnvrtc.so` on the loader's path.

use burn_megatron_kernels::cube::catalog::{Architecture, Entry, kernels};
use cudarc::nvrtc::result as nvrtc;
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Ampere and Hopper. (A kernel for `sm_90a` may use what later cards lack.)
const ARCHITECTURES: [Architecture; 2] = [Architecture(80), Architecture(90)];

struct Compilers {
    ptxas: PathBuf,
    includes: Vec<String>,
    /// Where sources go.
    folder: PathBuf,
}

/// What `ptxas` says of a kernel.
struct Usage {
    registers: usize,
    spilled: usize,
    tensor_cores: bool,
}

fn target(architecture: Architecture) -> String {
    match architecture.0 {
        90 => "sm_90a".into(),
        other => format!("sm_{other}"),
    }
}

impl Compilers {
    fn ptx(&self, source: &str, architecture: Architecture) -> Result<Vec<u8>, String> {
        let source = CString::new(source).map_err(|e| e.to_string())?;
        let program = nvrtc::create_program(source.as_c_str(), None);
        let program = program.map_err(|e| format!("NVRTC: {e:?}"))?;
        let target = format!("--gpu-architecture={}", target(architecture));
        let mut options = vec![target.as_str()];
        options.extend(self.includes.iter().map(String::as_str));
        // SAFETY: the program was made above, and is destroyed after its last use.
        unsafe {
            let result = match nvrtc::compile_program(program, &options) {
                Ok(()) => nvrtc::get_ptx(program)
                    .map(|ptx| {
                        ptx.iter()
                            .map(|b| *b as u8)
                            .take_while(|b| *b != 0)
                            .collect()
                    })
                    .map_err(|e| format!("NVRTC: {e:?}")),
                Err(_) => {
                    let log = nvrtc::get_program_log(program).map_err(|e| format!("{e:?}"))?;
                    Err(CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned())
                }
            };
            nvrtc::destroy_program(program).map_err(|e| format!("NVRTC: {e:?}"))?;
            result
        }
    }

    fn usage(&self, ptx: &Path, architecture: Architecture) -> Result<Usage, String> {
        let text = std::fs::read_to_string(ptx).map_err(|e| e.to_string())?;
        let arch = format!("-arch={}", target(architecture));
        let mut command = Command::new(&self.ptxas);
        let command = command.args(["-v", &arch, "-o", "/dev/null"]).arg(ptx);
        let out = command.output();
        let out = out.map_err(|e| format!("{}: {e}", self.ptxas.display()))?;
        let log = String::from_utf8_lossy(&out.stderr);
        if !out.status.success() {
            return Err(log.into_owned());
        }
        let before = |what: &str| -> Option<usize> {
            let (start, _) = log.split_once(what)?;
            start.split_whitespace().next_back()?.parse().ok()
        };
        let missing = || format!("ptxas said something else:\n{log}");
        Ok(Usage {
            registers: before(" registers").ok_or_else(missing)?,
            spilled: before(" bytes spill stores").ok_or_else(missing)?,
            tensor_cores: text.contains("mma.sync"),
        })
    }

    /// A line of the table, and whether the kernel passes.
    fn check(&self, entry: &Entry, architecture: Architecture) -> Result<(String, bool), String> {
        let source = entry.source(architecture)?;
        let name = format!("{}.{}", entry.name, target(architecture));
        let path = |ending: &str| self.folder.join(format!("{name}.{ending}"));
        let write = |ending, bytes: &[u8]| {
            std::fs::write(path(ending), bytes)
                .map_err(|e| format!("{}: {e}", path(ending).display()))
        };
        write("cu", source.text.as_bytes())?;
        write("ptx", &self.ptx(&source.text, architecture)?)?;
        let usage = self.usage(&path("ptx"), architecture)?;
        let mut faults = Vec::new();
        if usage.spilled > 0 {
            faults.push(format!("spills {} bytes", usage.spilled));
        }
        if usage.registers > entry.registers {
            faults.push(format!("may use {} registers", entry.registers));
        }
        if entry.tensor_cores && !usage.tensor_cores {
            faults.push("uses no tensor cores".into());
        }
        let line = format!(
            "{:<44} {:<7} {:>4} of {:>3} {:>9} {:>6} {:>7}  {}",
            entry.name,
            target(architecture),
            usage.registers,
            entry.registers,
            source.shared_bytes,
            usage.spilled,
            if usage.tensor_cores { "yes" } else { "-" },
            faults.join(", ")
        );
        Ok((line, faults.is_empty()))
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [ptxas, includes, folder, rest @ ..] = &arguments[..] else {
        eprintln!(
            "usage: ptx <ptxas> <include folders, separated by colons> <folder> [part of a name]"
        );
        return ExitCode::from(2);
    };
    if let Err(e) = std::fs::create_dir_all(folder) {
        eprintln!("{folder}: {e}");
        return ExitCode::from(2);
    }
    let includes = includes
        .split(':')
        .map(|path| format!("--include-path={path}"));
    let compilers = Compilers {
        ptxas: ptxas.into(),
        includes: includes.collect(),
        folder: folder.into(),
    };
    println!(
        "{:<44} {:<7} {:>11} {:>9} {:>6} {:>7}",
        "kernel", "target", "registers", "shared, B", "spills", "tensor"
    );
    let entries = kernels().into_iter();
    let entries = entries.filter(|entry| rest.first().is_none_or(|part| entry.name.contains(part)));
    let work: Vec<(Entry, Architecture)> = entries
        .flat_map(|entry| ARCHITECTURES.map(|architecture| (entry.clone(), architecture)))
        .collect();
    let next = AtomicUsize::new(0);
    let failed = AtomicUsize::new(0);
    // One kernel after another for each thread, and lines as they are done.
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((entry, architecture)) = work.get(next.fetch_add(1, Relaxed)) {
                    let name = format!("{} {}", entry.name, target(*architecture));
                    let checked = compilers.check(entry, *architecture);
                    let (line, passes) =
                        checked.unwrap_or_else(|e| (format!("{name}: {e}"), false));
                    println!("{line}");
                    failed.fetch_add(usize::from(!passes), Relaxed);
                }
            });
        }
    });
    let failed = failed.into_inner();
    println!("{} compiled, {failed} failed", work.len() - failed);
    ExitCode::from(u8::from(failed > 0 || work.is_empty()))
}
