//! Ctrl-C: once to stop after the step under way, twice to stop at once.

use super::terminal;
use crate::error::{Failure, INTERRUPTED, Result};
use burn::train::Interrupter;
use std::sync::atomic::{AtomicBool, Ordering};

/// Makes SIGINT, SIGTERM and SIGHUP stop the run through burn-train's interrupter.
pub fn install(interrupter: &Interrupter) -> Result<()> {
    let interrupter = interrupter.clone();
    let asked = AtomicBool::new(false);
    let installed = ctrlc::set_handler(move || {
        if asked.swap(true, Ordering::Relaxed) {
            terminal::restore();
            std::process::exit(i32::from(INTERRUPTED));
        }
        interrupter.stop(Some("a signal"));
        if !terminal::has_dashboard() {
            eprintln!("stopping after this step; press Ctrl-C again to stop at once");
        }
    });
    installed.map_err(|error| {
        Failure::run(
            format!("Ctrl-C cannot be caught: {error}"),
            "start the program where it may set signal handlers",
        )
    })
}
