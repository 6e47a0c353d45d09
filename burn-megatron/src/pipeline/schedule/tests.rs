use super::*;
use crate::pipeline::{Durations, simulate};
use proptest::prelude::*;
use serde_json::Value;

fn shape(p: usize, m: usize, v: usize) -> PipelineShape {
    PipelineShape::new(p, m).with_virtual_stages(v)
}

fn megatrons(section: &str) -> Vec<Value> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/pipeline_schedules.json"
    );
    let text = std::fs::read_to_string(path).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    all[section].as_array().unwrap().clone()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

/// A rank's order as Megatron writes it: `["F", microbatch, chunk]`.
fn ops(schedule: &Schedule, rank: usize) -> Vec<(String, usize, usize)> {
    let shape = *schedule.shape();
    let op = |action: Action| {
        let kind = if action.kind == Kind::Forward {
            "F"
        } else {
            "B"
        };
        (kind.into(), action.microbatch, shape.chunk_of(action.stage))
    };
    schedule.compute(rank).map(op).collect()
}

#[test]
fn one_f_one_b_is_megatrons() {
    let cases = megatrons("non_interleaved");
    assert_eq!(cases.len(), 6);
    for case in cases {
        let (p, m) = (number(&case["p"]), number(&case["m"]));
        let schedule =
            Schedule::new(PipelineSchedule::OneForwardOneBackward, shape(p, m, 1)).unwrap();
        for (rank, want) in case["ranks"].as_array().unwrap().iter().enumerate() {
            let op = |op: &Value| (op[0].as_str().unwrap().into(), number(&op[1]), 0);
            let want: Vec<_> = want["ops"].as_array().unwrap().iter().map(op).collect();
            assert_eq!(ops(&schedule, rank), want, "p={p} m={m} rank {rank}");
        }
    }
}

#[test]
fn interleaving_is_megatrons() {
    let cases = megatrons("interleaved");
    assert_eq!(cases.len(), 6);
    for case in cases {
        let [p, m, v] = ["p", "m", "v"].map(|key| number(&case[key]));
        let group = number(&case["microbatch_group_size_per_vp_stage"]);
        let shape = PipelineShape {
            group_size: Some(group),
            ..shape(p, m, v)
        };
        let schedule = Schedule::new(PipelineSchedule::Interleaved, shape).unwrap();
        for (rank, want) in case["ranks"].as_array().unwrap().iter().enumerate() {
            let op = |op: &Value| {
                let kind = op[0].as_str().unwrap().into();
                (kind, number(&op[1]), number(&op[2]))
            };
            let ops_of_rank: Vec<_> = want["ops"].as_array().unwrap().iter().map(op).collect();
            let at = format!("p={p} m={m} v={v} rank {rank}");
            assert_eq!(ops(&schedule, rank), ops_of_rank, "{at}");
            let in_flight = schedule.max_in_flight(rank);
            assert_eq!(in_flight, number(&want["max_in_flight"]), "{at}");
        }
    }
}

#[test]
fn what_cannot_be_interleaved_is_refused_with_what_can() {
    let refused = |p, m, v, group_size| {
        let shape = PipelineShape {
            group_size,
            ..shape(p, m, v)
        };
        let error = Schedule::new(PipelineSchedule::Interleaved, shape);
        error.unwrap_err().to_string()
    };
    for (error, words) in [
        (
            refused(4, 6, 2, None),
            ["2 left over", "4 micro batches, 8 micro batches"],
        ),
        (refused(4, 3, 2, None), ["groups of 4", "4 micro batches"]),
        (refused(1, 4, 2, None), ["at least 2 ranks", "2"]),
        (refused(4, 8, 2, Some(3)), ["between", "4"]),
        (
            refused(4, 7, 2, Some(5)),
            ["2 left over", "5 micro batches, 9 micro batches"],
        ),
    ] {
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let error = Schedule::new(PipelineSchedule::GPipe, shape(4, 8, 2)).unwrap_err();
    assert!(error.to_string().contains("one virtual stage"), "{error}");
}

#[test]
fn a_schedule_that_waits_in_a_circle_is_found() {
    let parse =
        |text: &str| -> Vec<Action> { text.split(' ').map(|word| word.parse().unwrap()).collect() };
    let shape = shape(2, 2, 1);
    // The naive 1F1B: both ranks send before they receive.
    let lists = vec![
        parse("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"),
        parse("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"),
    ];
    let error = Schedule::from_actions(shape, lists.clone())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("rank 0 waits in 0SEND_F1 for rank 1"),
        "{error}"
    );
    assert!(
        error.contains("rank 1 waits in 1SEND_B0 for rank 0"),
        "{error}"
    );
    // Taking the activations first frees both.
    let mut freed = lists.clone();
    freed[1].swap(3, 4);
    Schedule::from_actions(shape, freed).unwrap();

    let broken = |rank: usize, change: &dyn Fn(&mut Vec<Action>)| {
        let mut lists = vec![
            parse("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"),
            parse("1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1"),
        ];
        change(&mut lists[rank]);
        Schedule::from_actions(shape, lists)
            .unwrap_err()
            .to_string()
    };
    let missing = broken(0, &|list| {
        list.remove(7);
    });
    assert!(missing.contains("rank 0 never runs 0B1"), "{missing}");
    let unsent = broken(0, &|list| {
        list.remove(3);
    });
    assert!(unsent.contains("0F1 without 0SEND_F1"), "{unsent}");
    let late = broken(1, &|list| list.swap(0, 1));
    assert!(late.contains("1F0 without 1RECV_F0"), "{late}");
    let early = broken(0, &|list| list.swap(0, 5));
    assert!(early.contains("0B0 before 0F0"), "{early}");
}

#[test]
fn equal_stages_have_the_bubble_of_the_papers() {
    // Narayanan et al. 2021, section 2.2: (p-1)/m, and (p-1)/(v m) interleaved.
    for (p, m, v) in [
        (2, 4, 1),
        (4, 4, 1),
        (4, 8, 1),
        (8, 32, 1),
        (4, 8, 2),
        (4, 32, 4),
        (2, 6, 3),
    ] {
        let kind = PipelineSchedule::default_for(v);
        let schedule = Schedule::new(kind, shape(p, m, v)).unwrap();
        // A backward as long as a forward, and twice as long.
        for backward in [1.0, 2.0] {
            let durations = Durations::equal(p * v, 1.0, backward, 0.0);
            let bubble = simulate(&schedule, &durations).bubble();
            let want = (p - 1) as f64 / (v * m) as f64;
            assert!(
                (bubble - want).abs() < 1e-9,
                "p={p} m={m} v={v}: {bubble}, not {want}"
            );
        }
    }
}

#[test]
fn activations_held_are_bounded_by_the_pipeline_not_by_the_batch() {
    let (p, m) = (4, 16);
    for (kind, held) in [
        (PipelineSchedule::GPipe, [16; 4]),
        (PipelineSchedule::OneForwardOneBackward, [4, 3, 2, 1]),
    ] {
        let schedule = Schedule::new(kind, shape(p, m, 1)).unwrap();
        let in_flight: Vec<_> = (0..p).map(|rank| schedule.max_in_flight(rank)).collect();
        assert_eq!(in_flight, held, "{kind}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the shape: the checker's proof holds for the lists, a simulation under arbitrary
    /// durations ends, no rank is ever busier than the makespan, and more time for messages never
    /// makes it shorter.
    #[test]
    fn every_legal_shape_has_a_sound_schedule(
        p in 1usize..7,
        m in 1usize..13,
        v in 1usize..4,
        forward in proptest::collection::vec(0.1f64..3.0, 18),
        backward in proptest::collection::vec(0.1f64..3.0, 18),
        transfer in 0f64..1.0,
    ) {
        let kinds = [
            (PipelineSchedule::GPipe, 1, m),
            (PipelineSchedule::OneForwardOneBackward, 1, m),
            (PipelineSchedule::Interleaved, v, p * m.div_ceil(3)),
        ];
        for (kind, v, m) in kinds {
            if kind == PipelineSchedule::Interleaved && p == 1 {
                continue;
            }
            let shape = shape(p, m, v);
            let schedule = Schedule::new(kind, shape).unwrap();
            let durations = |transfer| Durations {
                forward: forward[..p * v].to_vec(),
                backward: backward[..p * v].to_vec(),
                transfer,
            };
            let timeline = simulate(&schedule, &durations(transfer));
            for rank in 0..p {
                prop_assert_eq!(timeline.compute(rank).count(), 2 * m * v);
                prop_assert!(timeline.busy(rank) <= timeline.makespan() + 1e-9);
                let starts: Vec<f64> = timeline.compute(rank).map(|span| span.start).collect();
                prop_assert!(starts.is_sorted());
            }
            let faster = simulate(&schedule, &durations(0.0));
            prop_assert!(faster.makespan() <= timeline.makespan() + 1e-9);
            prop_assert!(timeline.bubble() >= -1e-9);

            let forward_only = schedule.forward_only();
            let sends: usize = (0..p).map(|rank| forward_only.sends(rank)).sum();
            prop_assert_eq!(sends, m * (p * v - 1));
            let sends: usize = (0..p).map(|rank| schedule.sends(rank)).sum();
            prop_assert_eq!(sends, 2 * m * (p * v - 1));
        }
    }
}

#[test]
fn the_example_of_the_readme_is_what_is_made() {
    let readme = include_str!("../README.md");
    let schedule = Schedule::new(PipelineSchedule::OneForwardOneBackward, shape(3, 4, 1)).unwrap();
    let timeline = simulate(&schedule, &Durations::equal(3, 1.0, 2.0, 0.0));
    for rank in 0..3 {
        let actions = schedule.actions(rank).iter().map(ToString::to_string);
        let list = format!("rank {rank}: {}\n", actions.collect::<Vec<_>>().join(" "));
        assert!(readme.contains(&list), "{list}");

        let mut cells = vec![String::from("."); 18];
        for span in timeline.compute(rank) {
            let name = span.action.to_string()[1..].to_string();
            cells[span.start as usize..span.end as usize].fill(name);
        }
        let cells: String = cells.iter().map(|cell| format!("{cell:<3}")).collect();
        let row = format!("rank {rank}  {}\n", cells.trim_end());
        assert!(readme.contains(&row), "{row}");
    }
}
