//! What is measured by the clock. A binary of its own, so that no other test shares the cores meanwhile.

use burn_megatron::pipeline::{Durations, Schedule, Timeline, execute, simulate};
use burn_megatron::prelude::*;
use burn_megatron::topology::{PipelineSchedule, PipelineShape};
use megatron_tests::sleeping::{Sleeping, pipeline_grid};
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for a run of one schedule that nobody disturbed: whoever else uses the cores makes
/// some ranks late, and the others wait for them.
const PATIENCE: Duration = Duration::from_secs(30);

/// Sleeps that end later than this, on average, tell of a machine whose cores are taken.
const BUSY: Duration = Duration::from_micros(200);

/// By how much four threads' sleeps end late, on average.
fn lateness() -> Duration {
    let asked = Duration::from_millis(2);
    let late = || {
        let start = Instant::now();
        (0..20).for_each(|_| thread::sleep(asked));
        start.elapsed().saturating_sub(20 * asked) / 20
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(late)).collect();
        let late = threads.into_iter().map(|t| t.join().expect("it sleeps"));
        late.sum::<Duration>() / 4
    })
}

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
    let (forward, backward) = (Duration::from_millis(12), Duration::from_millis(24));
    for (m, v) in [(4, 1), (8, 1), (32, 1), (4, 2), (8, 2), (32, 2)] {
        let shape = PipelineShape::new(4, m).with_virtual_stages(v);
        let schedule =
            Schedule::new(PipelineSchedule::default_for(v), shape).expect("a legal shape");
        let durations = Durations::equal(shape.num_stages(), 12.0, 24.0, 0.0);
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
        let late = lateness();
        println!(
            "m={m} v={v}: off by {:.3}, sleeps late by {late:?}",
            off(&best)
        );
        if off(&best) > 0.1 && late > BUSY {
            // Its ranks wait for a core, not for one another: the clock says nothing of the schedule.
            eprintln!("the machine is too busy to judge the schedule by the clock");
            continue;
        }
        assert!(
            off(&best) <= 0.1,
            "m={m} v={v}: measured {:.4}, simulated {simulated:.4}",
            best.bubble()
        );
    }
}
