use super::super::planned;
use super::*;
use burn_megatron::topology::PipelineSchedule;

const COLOUR: Look = Look {
    colour: true,
    width: None,
};

#[test]
fn a_small_one() {
    let planned = planned(PipelineSchedule::OneForwardOneBackward, 2, 2, 1);
    let expected = "\
1f1b: p = 2 ranks, v = 1 stage on each, m = 2 micro batches; forward 1, backward 2, p2p 0 units of time

time    |0             |5
rank 0  F0 F1 ......B0--- ...B1---
rank 1  ...F0 B0--- F1 B1--- ......

F1 forward and B1 backward of micro batch 1, .. idle

";
    let text = text(&planned, Look::PLAIN);
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn without_colours_every_computation_has_its_label() {
    let planned = planned(PipelineSchedule::Interleaved, 4, 12, 3);
    let text = text(&planned, Look::PLAIN);
    assert!(!text.contains('\x1b'), "{text}");
    let table: String = text.split("\n\n").nth(1).unwrap().replace(['-', '.'], " ");
    let rows: Vec<&str> = table.lines().skip(1).collect();
    assert_eq!(rows.len(), 4);
    for row in rows {
        for microbatch in 0..12 {
            for label in ["F", "B"].map(|kind| format!("{kind}{microbatch}")) {
                for chunk in ["a", "b", "c"] {
                    let label = format!("{label}{chunk}");
                    let found = row.split(' ').filter(|word| *word == label);
                    assert_eq!(found.count(), 1, "{label}: {row}");
                }
            }
        }
    }
}

#[test]
fn colours_tell_kinds_and_chunks_apart() {
    let mut styles = Vec::new();
    for kind in [Kind::Forward, Kind::Backward] {
        styles.extend((0..4).map(|chunk| COLOUR.style(kind, chunk, 4).to_string()));
    }
    styles.sort();
    styles.dedup();
    assert_eq!(styles.len(), 8);
    assert_eq!(COLOUR.label(Kind::Backward, 3, 1, 4), "3");
    assert_eq!(COLOUR.label(Kind::Backward, 3, 1, 5), "3b");
    let planned = planned(PipelineSchedule::Interleaved, 2, 4, 40);
    assert!(
        text(&planned, COLOUR).contains("0an"),
        "more chunks than letters"
    );
}

#[test]
fn wide_tables_come_in_bands() {
    let planned = planned(PipelineSchedule::OneForwardOneBackward, 4, 8, 1);
    let whole = text(&planned, Look::PLAIN);
    for width in [1, 40, 80] {
        let look = Look {
            width: Some(width),
            ..Look::PLAIN
        };
        let text = text(&planned, look);
        let table = text.split_once('\n').unwrap().1;
        let rows = table.lines().filter(|line| line.starts_with("rank "));
        let bands = rows.clone().count() / 4;
        assert!(bands > 1);
        assert!(rows.clone().all(|row| row.len() <= width.max(32)), "{text}");
        for label in ["F0", "F7", "B3"] {
            let count = |text: &str| text.matches(label).count();
            // The legend's is one more in both.
            assert_eq!(count(&text), count(&whole), "{label}: {text}");
        }
    }
}

#[test]
fn a_very_long_one_shows_its_ends() {
    let planned = planned(PipelineSchedule::OneForwardOneBackward, 4, 1000, 1);
    let look = Look {
        width: Some(100),
        ..Look::PLAIN
    };
    let text = text(&planned, look);
    assert!(text.lines().count() < 130);
    assert!(text.contains("left out"), "{text}");
    assert!(text.contains("F0") && text.contains("B999-"), "{text}");
}

#[test]
fn odd_times_are_drawn_to_scale() {
    let draw = |forward, backward, p2p| {
        let times = super::super::Times {
            forward,
            backward,
            p2p,
        };
        let kind = PipelineSchedule::OneForwardOneBackward;
        let shape = burn_megatron::topology::PipelineShape::new(2, 2);
        let planned = Planned::of_shape(kind, shape, times).unwrap();
        text(&planned, Look::PLAIN)
    };
    assert!(draw(0.1, 0.25, 0.05).contains("rank 1  .....F0 B0---- F1 B1----- ."));
    // Nothing to see of a forward that takes no time, nor of one that is a millionth.
    assert!(draw(0.0, 1.0, 0.0).contains("rank 1  B0 B1 ..."));
    let text = draw(1e-6, 1.0, 1e9);
    assert!(text.len() < 10_000, "{text}");
}
