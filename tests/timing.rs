//! What is measured by the clock. A binary of its own, so that no other test shares the cores meanwhile.

use burn_megatron::pipeline::{Durations, Schedule, Timeline, execute, simulate};
use burn_megatron::prelude::*;
use burn_megatron::topology::{PipelineSchedule, PipelineShape};
use megatron_tests::sleeping::{Sleeping, pipeline_grid};
use std::time::{Duration, Instant};

/// How long to wait for a run of one schedule that nobody disturbed: whoever else uses the cores makes
/// some ranks late, and the others wait for them.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the schedule on ranks that sleep.
fn measure(schedule: &Schedule, forward: Duration, backward: Duration) -> Timeline {
    let shape = *schedule.shape();
    let spans = run_ranks(&pipeline_grid(shape.ranks), DEFAULT_TIMEOUT, |rank| {
        let mut work = Sleeping {
            last: shape.num_stages() - 1,
            forward,
            backward,
            dies_at: None,
        };
        // All ranks begin together, as they do at the end of the step before.
        rank.groups.world.comm.barrier()?;
        execute(schedule, &*rank.groups.pp.comm, &mut work, rank.clock)
    });
    Timeline {
        ranks: spans.expect("ranks"),
    }
}

#[test]
fn the_measured_bubble_is_the_simulated_one() {
    let (forward, backward) = (Duration::from_millis(6), Duration::from_millis(12));
    for (m, v) in [(4, 1), (8, 1), (32, 1), (4, 2), (8, 2), (32, 2)] {
        let shape = PipelineShape::new(4, m).with_virtual_stages(v);
        let schedule =
            Schedule::new(PipelineSchedule::default_for(v), shape).expect("a legal shape");
        let durations = Durations::equal(shape.num_stages(), 6.0, 12.0, 0.0);
        let simulated = simulate(&schedule, &durations).bubble();
        let off = |timeline: &Timeline| (timeline.bubble() / simulated - 1.0).abs();
        // A schedule that is run wrongly is off in every run; a disturbed one only in some.
        let start = Instant::now();
        let mut best = measure(&schedule, forward, backward);
        while off(&best) > 0.1 && start.elapsed() < PATIENCE {
            let next = measure(&schedule, forward, backward);
            if off(&next) < off(&best) {
                best = next;
            }
        }
        assert!(
            off(&best) <= 0.1,
            "m={m} v={v}: measured {:.4}, simulated {simulated:.4}",
            best.bubble()
        );
    }
}
