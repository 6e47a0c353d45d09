//! One setting of the system's allocator that training is sensitive to.

/// Makes the C library keep freed memory instead of returning it to the system at once.
///
/// Burn allocates and frees every activation; glibc maps each large one anew, and a third of a CPU
/// step then goes to page faults. Call it once, at the start of `main`. The process keeps its
/// peak memory. Does nothing where the allocator is not glibc's.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt takes two integers, and is thread-safe in glibc. Returning 0 (refused)
    // leaves the defaults, which are only slower.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
    }
}
