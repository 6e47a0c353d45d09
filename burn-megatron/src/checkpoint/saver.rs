//! Saving beside the training.

use super::write::{SaveTo, Saved, Snapshot, write};
use crate::comm::CommRef;
use crate::error::{Error, Result};
use crate::memory::MemoryAccount;
use std::io;
use std::thread::JoinHandle;

/// One rank's saves: one at a time, by the rank itself or by a thread of its own. The ranks' savers talk over
/// a group that nobody else uses, so that a save in the background meets no other collective.
#[derive(Debug)]
pub struct Saver {
    to: SaveTo,
    world: CommRef,
    pending: Option<JoinHandle<Result<Saved>>>,
}

impl Saver {
    /// A saver into a directory; `world` joins the savers of all ranks.
    pub fn new(to: SaveTo, world: CommRef) -> Self {
        Saver {
            to,
            world,
            pending: None,
        }
    }

    /// Saves, and returns when the checkpoint is on the disk. Every rank calls it.
    ///
    /// # Errors
    /// If a rank cannot write, on every rank; or if the save before this one failed.
    pub fn save(&mut self, snapshot: &Snapshot<'_>) -> Result<Saved> {
        if let Some(before) = self.wait() {
            before?;
        }
        write(snapshot, &self.to, &*self.world)
    }

    /// Copies the snapshot and saves the copy in the background. It waits for the save before this one, whose
    /// outcome it returns. Every rank calls it.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn save_in_background(&mut self, snapshot: Snapshot<'_>) -> Result<Option<Result<Saved>>> {
        let before = self.wait();
        let snapshot = snapshot.into_owned();
        let (to, world) = (self.to.clone(), self.world.clone());
        let memory = MemoryAccount::of_this_thread();
        let run = move || {
            memory.into_iter().for_each(MemoryAccount::enter);
            write(&snapshot, &to, &*world)
        };
        let thread = std::thread::Builder::new().name("checkpoint".into());
        let thread = thread.spawn(run).map_err(|e| Error::io(&self.to.dir, e))?;
        self.pending = Some(thread);
        Ok(before)
    }

    /// The outcome of a save in the background that has ended since it was last asked for.
    pub fn finished(&mut self) -> Option<Result<Saved>> {
        let done = self.pending.as_ref().is_some_and(JoinHandle::is_finished);
        done.then(|| self.wait()).flatten()
    }

    /// Waits for the save in the background, if there is one.
    pub fn wait(&mut self) -> Option<Result<Saved>> {
        let outcome = self.pending.take()?.join();
        let dir = &self.to.dir;
        let ended = || {
            Err(Error::io(
                dir,
                io::Error::other("the writing thread panicked"),
            ))
        };
        Some(outcome.unwrap_or_else(|_| ended()))
    }
}

impl Drop for Saver {
    /// Nothing that was begun is left half done.
    fn drop(&mut self) {
        self.wait();
    }
}
