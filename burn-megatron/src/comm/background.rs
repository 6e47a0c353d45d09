//! Collectives on a thread of their own, while the rank computes.

use crate::error::{ErrorKind, Result};
use crate::memory::MemoryAccount;
use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs what it is given, one after another. Whoever hands it a group's collectives makes none
/// of that group's until they are done: all ranks then make the same calls in the same order.
pub struct Background {
    rank: usize,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Background(rank {})", self.rank)
    }
}

impl Background {
    /// Starts the thread of world rank `rank`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(rank: usize) -> Result<Self> {
        let (jobs, received) = channel::<Job>();
        let memory = MemoryAccount::of_this_thread();
        let run = move || {
            memory.into_iter().for_each(MemoryAccount::enter);
            received.into_iter().for_each(|job| job());
        };
        let thread = std::thread::Builder::new().name(format!("rank {rank} communication"));
        let thread = thread.spawn(run).map_err(|e| {
            let reason = format!("has no thread for communication: {e}");
            ErrorKind::Rank { rank, reason }
        })?;
        Ok(Background {
            rank,
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }

    /// Runs `job` after those before it.
    pub fn submit<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let (sender, result) = channel();
        let run = move || {
            // A rank that unwinds waits for nothing any more.
            let _ = sender.send(job());
        };
        if let Some(jobs) = &self.jobs {
            // A thread that is gone shows as a result that never comes.
            let _ = jobs.send(Box::new(run));
        }
        let rank = self.rank;
        Pending { rank, result }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A result to be waited for.
#[derive(Debug)]
pub struct Pending<T> {
    rank: usize,
    result: Receiver<Result<T>>,
}

impl<T> Pending<T> {
    /// Waits for it: as long as the collective itself would.
    ///
    /// # Errors
    /// The job's own, or that its thread ended without one.
    pub fn wait(self) -> Result<T> {
        let rank = self.rank;
        let ended = |_| {
            let reason = "lost its communication thread".into();
            ErrorKind::Rank { rank, reason }.into()
        };
        self.result.recv().unwrap_or_else(|e| Err(ended(e)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_run_in_order_and_their_errors_come_back() {
        let background = Background::start(3).unwrap();
        let (sender, order) = channel();
        let pending: Vec<_> = (0..5)
            .map(|i| {
                let sender = sender.clone();
                background.submit(move || {
                    sender.send(i).unwrap();
                    Ok(i * i)
                })
            })
            .collect();
        let fails = background.submit(|| -> Result<()> {
            let (rank, reason) = (3, "broke".into());
            Err(ErrorKind::Rank { rank, reason }.into())
        });
        let results: Vec<i32> = pending.into_iter().map(|p| p.wait().unwrap()).collect();
        assert_eq!(results, [0, 1, 4, 9, 16]);
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        assert_eq!(fails.wait().unwrap_err().to_string(), "rank 3 broke");
        let lost = background.submit(|| -> Result<()> { std::panic::resume_unwind(Box::new(())) });
        assert!(lost.wait().is_err());
    }
}
