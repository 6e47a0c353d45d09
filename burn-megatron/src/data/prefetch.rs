//! Batches made ready on a thread of their own while the step before is computed.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use crate::memory::MemoryAccount;
use crate::{Error, Result};

/// Runs a producer ahead of its consumer, by a bounded number of items.
///
/// Items come in the order of steps. Dropping this stops the producer after the item it is at, and
/// waits for it.
pub struct Prefetch<T> {
    /// `None` once dropping has begun.
    items: Option<Receiver<Result<T>>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Prefetch<T> {
    /// Starts a thread that calls `produce(step)` for each of `steps`, at most `depth` items (at
    /// least 1) ahead of [`next`](Self::next), and stops at the first error.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn spawn<F>(steps: Range<u64>, depth: usize, mut produce: F) -> Result<Self>
    where
        F: FnMut(u64) -> Result<T> + Send + 'static,
    {
        // One item waits in the producer's hands when the channel is full.
        let (sender, receiver) = sync_channel(depth.saturating_sub(1));
        // What the thread allocates is its consumer's.
        let memory = MemoryAccount::of_this_thread();
        let run = move || {
            memory.into_iter().for_each(MemoryAccount::enter);
            for step in steps {
                // Nothing of the producer is used again after a panic.
                let item = catch_unwind(AssertUnwindSafe(|| produce(step)))
                    .unwrap_or_else(|panic| Err(panic_error(step, panic.as_ref())));
                let failed = item.is_err();
                // A send fails when the consumer is gone.
                if sender.send(item).is_err() || failed {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("prefetch".to_string())
            .spawn(run)
            .map_err(|e| Error::io("prefetch thread", e))?;
        Ok(Self {
            items: Some(receiver),
            thread: Some(thread),
        })
    }

    /// The item of the next step, waiting for it; `None` after the last one, or after an error.
    ///
    /// # Errors
    /// The producer's error, or its panic's message and step.
    #[allow(clippy::should_implement_trait)] // `Iterator::next` would nest the result the other way.
    pub fn next(&mut self) -> Result<Option<T>> {
        match self.items.as_ref().map(Receiver::recv) {
            Some(Ok(item)) => item.map(Some),
            // The producer has ended and all it made is consumed.
            Some(Err(_)) | None => Ok(None),
        }
    }
}

impl<T> Drop for Prefetch<T> {
    fn drop(&mut self) {
        // In this order: a producer blocked on a full channel wakes when the receiver goes.
        drop(self.items.take());
        if let Some(thread) = self.thread.take() {
            // Panics of the producer are caught inside.
            let _ = thread.join();
        }
    }
}

fn panic_error(step: u64, panic: &(dyn Any + Send)) -> Error {
    let message = panic_message(panic);
    let reason = format!("the producer of batches panicked at step {step}: {message}");
    Error::data("prefetch", None, reason)
}

/// What a panic said, where it said it in text.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn gives_every_step_in_order_and_then_none() {
        let mut prefetch = Prefetch::spawn(3..8, 2, |step| Ok(step * 10)).unwrap();
        for step in 3..8 {
            assert_eq!(prefetch.next().unwrap(), Some(step * 10));
        }
        assert_eq!(prefetch.next().unwrap(), None);
        assert_eq!(prefetch.next().unwrap(), None);
    }

    #[test]
    fn an_error_arrives_after_the_items_before_it() {
        let mut prefetch = Prefetch::spawn(0..10, 4, |step| match step {
            2 => Err(Error::data("corpus.bin", 12, "broken")),
            _ => Ok(step),
        })
        .unwrap();
        assert_eq!(prefetch.next().unwrap(), Some(0));
        assert_eq!(prefetch.next().unwrap(), Some(1));
        let error = prefetch.next().unwrap_err().to_string();
        assert_eq!(error, "corpus.bin at byte 12: broken");
        assert_eq!(prefetch.next().unwrap(), None);
    }

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        let mut prefetch = Prefetch::spawn(0..10, 1, |step| {
            assert!(step < 1, "no sample {step}");
            Ok(step)
        })
        .unwrap();
        assert_eq!(prefetch.next().unwrap(), Some(0));
        let error = prefetch.next().unwrap_err().to_string();
        assert!(error.contains("panicked at step 1: no sample 1"), "{error}");
    }

    #[test]
    fn runs_ahead_by_its_depth_and_no_further() {
        for depth in [1, 3] {
            let made = Arc::new(AtomicU64::new(0));
            let counter = made.clone();
            let mut prefetch = Prefetch::spawn(0..100, depth, move |step| {
                counter.fetch_add(1, Ordering::SeqCst);
                Ok(step)
            })
            .unwrap();
            let wait_for = |count| {
                let deadline = Instant::now() + Duration::from_secs(10);
                while made.load(Ordering::SeqCst) < count && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
                std::thread::sleep(Duration::from_millis(20));
                assert_eq!(made.load(Ordering::SeqCst), count);
            };
            wait_for(depth as u64);
            prefetch.next().unwrap();
            wait_for(depth as u64 + 1);
        }
    }

    #[test]
    fn dropping_stops_a_producer_that_waits() {
        let alive = Arc::new(());
        let held = alive.clone();
        let prefetch = Prefetch::spawn(0..u64::MAX, 2, move |step| {
            let _ = &held;
            Ok(step)
        })
        .unwrap();
        let start = Instant::now();
        drop(prefetch);
        assert!(start.elapsed() < Duration::from_secs(5));
        assert_eq!(Arc::strong_count(&alive), 1, "the thread is still there");
    }
}
