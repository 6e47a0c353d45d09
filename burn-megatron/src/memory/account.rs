//! Bytes of the heap, counted by the rank whose threads allocate and free them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};

/// The system's allocator, which counts. A program that wants to know what its ranks use installs it:
///
/// ```
/// use burn_megatron::memory::CountingAllocator;
///
/// #[global_allocator]
/// static HEAP: CountingAllocator = CountingAllocator;
/// ```
///
/// Each allocation costs one or two atomic additions to a number of its rank's own.
#[derive(Debug, Default, Clone, Copy)]
pub struct CountingAllocator;

/// Whether the program installed it.
static COUNTING: AtomicBool = AtomicBool::new(false);

#[derive(Debug, Default)]
struct Bytes {
    current: AtomicI64,
    peak: AtomicI64,
}

impl Bytes {
    fn add(&self, bytes: i64) {
        let current = self.current.fetch_add(bytes, Relaxed) + bytes;
        if bytes > 0 {
            self.peak.fetch_max(current, Relaxed);
        }
    }
}

thread_local! {
    static ACCOUNT: Cell<Option<MemoryAccount>> = const { Cell::new(None) };
}

fn count(bytes: i64) {
    if !COUNTING.load(Relaxed) {
        COUNTING.store(true, Relaxed);
    }
    // A thread that ends may free after its local is gone.
    let account = ACCOUNT.try_with(Cell::get).unwrap_or_default();
    if let Some(MemoryAccount(account)) = account {
        account.add(bytes);
    }
}

// SAFETY: every call goes to `System` as it is; counting neither allocates nor panics.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that `System` asks for.
        let at = unsafe { System.alloc(layout) };
        if !at.is_null() {
            count(layout.size() as i64);
        }
        at
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let at = unsafe { System.alloc_zeroed(layout) };
        if !at.is_null() {
            count(layout.size() as i64);
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) };
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        let new = unsafe { System.realloc(at, layout, size) };
        if !new.is_null() {
            count(size as i64 - layout.size() as i64);
        }
        new
    }
}

/// What the threads of one rank have allocated and not freed. Memory that one rank's threads allocate
/// and another's free would be counted for the wrong one; messages between ranks change accounts when
/// they are sent.
#[derive(Clone, Copy)]
pub struct MemoryAccount(&'static Bytes);

impl MemoryAccount {
    /// An empty account. It lives as long as the process: threads may free what they allocated long after
    /// their rank is done.
    pub fn new() -> Self {
        MemoryAccount(Box::leak(Box::default()))
    }

    /// Counts in it what the current thread allocates and frees from now on.
    pub fn enter(self) {
        ACCOUNT.set(Some(self));
    }

    /// The one that the current thread counts in.
    pub fn of_this_thread() -> Option<Self> {
        ACCOUNT.get()
    }

    /// Bytes in use; `None` where the program does not count.
    pub fn current(self) -> Option<u64> {
        self.read(&self.0.current)
    }

    /// Runs `f` on the current thread, and says how many bytes more are in use after it.
    pub fn measure<T>(self, f: impl FnOnce() -> T) -> (T, Option<u64>) {
        let before = self.current();
        let result = f();
        let more = self.current().zip(before);
        (result, more.map(|(now, before)| now.saturating_sub(before)))
    }

    /// The most bytes that were in use at once since the last [`reset_peak`](MemoryAccount::reset_peak).
    pub fn peak(self) -> Option<u64> {
        self.read(&self.0.peak)
    }

    /// Starts a new peak from what is in use.
    pub fn reset_peak(self) {
        self.0.peak.store(self.0.current.load(Relaxed), Relaxed);
    }

    fn read(self, bytes: &AtomicI64) -> Option<u64> {
        (COUNTING.load(Relaxed)).then(|| u64::try_from(bytes.load(Relaxed)).unwrap_or(0))
    }
}

impl Default for MemoryAccount {
    fn default() -> Self {
        MemoryAccount::new()
    }
}

impl fmt::Debug for MemoryAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryAccount({:?} bytes)", self.current())
    }
}

/// The current thread hands an allocation of so many bytes to another rank.
pub(crate) fn given_away(bytes: usize) {
    if COUNTING.load(Relaxed) {
        count(-(bytes as i64));
    }
}

/// The current thread got an allocation of so many bytes from another rank.
pub(crate) fn taken_over(bytes: usize) {
    if COUNTING.load(Relaxed) {
        count(bytes as i64);
    }
}
