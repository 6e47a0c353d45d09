//! Where a rank's memory goes: a setting of the allocator, and bytes counted rank by rank.

mod account;
mod allocator;

pub use account::{CountingAllocator, MemoryAccount};
pub(crate) use account::{given_away, taken_over};
pub use allocator::keep_freed_memory;
