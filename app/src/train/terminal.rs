//! Which renderer draws the run, and the terminal's state around burn-train's dashboard.

use super::feed::Remarks;
use super::lines::{LineConfig, Lines};
use super::plan::Plan;
use burn::train::Interrupter;
use burn::train::renderer::MetricsRenderer;

/// The dashboard where the output is a terminal, else lines, with what is remarked between them.
pub fn renderer(
    plan: &Plan,
    interrupter: &Interrupter,
    remarks: &Remarks,
) -> Box<dyn MetricsRenderer> {
    #[cfg(feature = "tui")]
    if dashboard::wanted(plan) {
        return dashboard::open(interrupter);
    }
    let _ = interrupter;
    let config = LineConfig {
        start: plan.start,
        train_iters: plan.config.training.train_iters,
        log_interval: plan.config.logging.log_interval,
        sizes: plan.config.training.batch_sizes(),
    };
    Box::new(Lines::new(config, remarks.clone(), std::io::stdout()))
}

/// Gives the terminal back as it was; for a process that ends without unwinding.
pub fn restore() {
    #[cfg(feature = "tui")]
    dashboard::restore();
}

/// Whether the dashboard has the terminal, and messages must not be printed.
pub fn has_dashboard() -> bool {
    #[cfg(feature = "tui")]
    return dashboard::is_open();
    #[cfg(not(feature = "tui"))]
    return false;
}

#[cfg(feature = "tui")]
mod dashboard {
    use super::{Interrupter, MetricsRenderer, Plan};
    use burn::train::renderer::tui::TuiMetricsRendererWrapper;
    use rustix::stdio::stdin;
    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
    use std::io::{IsTerminal, Write};
    use std::sync::OnceLock;
    use std::time::Duration;

    /// The terminal before the dashboard took it.
    static BEFORE: OnceLock<Termios> = OnceLock::new();

    /// Leaves the alternate screen, stops reporting the mouse, shows the cursor.
    const LEAVE: &[u8] =
        b"\x1b[?1006l\x1b[?1015l\x1b[?1003l\x1b[?1002l\x1b[?1000l\x1b[?1049l\x1b[?25h";

    pub fn wanted(plan: &Plan) -> bool {
        // The dashboard reads keys: without a terminal to read from it could not be left.
        let terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
        terminal && !plan.config.logging.no_tui
    }

    pub fn open(interrupter: &Interrupter) -> Box<dyn MetricsRenderer> {
        if let Ok(before) = tcgetattr(stdin()) {
            let _ = BEFORE.set(before);
        }
        let renderer = TuiMetricsRendererWrapper::new(interrupter.clone(), None);
        keep_interrupt_key();
        Box::new(renderer)
    }

    /// The dashboard's raw mode turns Ctrl-C into a key that it ignores; this makes it a signal
    /// again, so that it stops a run the same way with and without a dashboard.
    fn keep_interrupt_key() {
        // The dashboard's own thread enters raw mode, some time after it was started.
        for _ in 0..100 {
            let Ok(mut mode) = tcgetattr(stdin()) else {
                return;
            };
            if !mode.local_modes.contains(LocalModes::ISIG) {
                mode.local_modes.insert(LocalModes::ISIG);
                // Failing that, the dashboard's own `q` still stops the run.
                let _ = tcsetattr(stdin(), OptionalActions::Now, &mode);
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn is_open() -> bool {
        BEFORE.get().is_some()
    }

    pub fn restore() {
        if let Some(before) = BEFORE.get() {
            let _ = std::io::stdout().write_all(LEAVE);
            let _ = std::io::stdout().flush();
            let _ = tcsetattr(stdin(), OptionalActions::Now, before);
        }
    }
}
