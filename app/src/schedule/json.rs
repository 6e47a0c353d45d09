//! A schedule as data, for other programs to compare with.

use burn_megatron::pipeline::{Action, Kind, Schedule};
use serde::Serialize;

/// A forward or backward, in Megatron's terms.
#[derive(Serialize)]
struct Op {
    kind: &'static str,
    microbatch: usize,
    chunk: usize,
}

/// A list for each rank of what it computes, in order; one rank a line.
pub fn json(schedule: &Schedule) -> String {
    let op = |action: Action| Op {
        kind: match action.kind {
            Kind::Backward => "B",
            _ => "F",
        },
        microbatch: action.microbatch,
        chunk: schedule.shape().chunk_of(action.stage),
    };
    let ranks = (0..schedule.shape().ranks).map(|rank| {
        let ops: Vec<Op> = schedule.compute(rank).map(op).collect();
        serde_json::to_string(&ops).expect("numbers and names are always JSON")
    });
    format!("[{}]\n", ranks.collect::<Vec<_>>().join(",\n "))
}

#[cfg(test)]
mod tests {
    use super::super::planned;
    use super::*;
    use burn_megatron::topology::PipelineSchedule;
    use serde_json::{Value, json};

    fn op(kind: &str, microbatch: usize, chunk: usize) -> Value {
        json!({ "kind": kind, "microbatch": microbatch, "chunk": chunk })
    }

    #[test]
    fn ranks_in_order_with_these_keys() {
        let planned = planned(PipelineSchedule::Interleaved, 2, 2, 2);
        let text = json(&planned.schedule);
        let ranks: Value = serde_json::from_str(&text).unwrap();
        let last_rank = json!([
            op("F", 0, 0),
            op("F", 1, 0),
            op("F", 0, 1),
            op("B", 0, 1),
            op("F", 1, 1),
            op("B", 1, 1),
            op("B", 0, 0),
            op("B", 1, 0),
        ]);
        assert_eq!(ranks[1], last_rank);
        assert_eq!(ranks.as_array().unwrap().len(), 2);
        assert_eq!(text.lines().count(), 2);
    }
}
