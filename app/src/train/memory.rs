//! What the ranks' memory goes to: predicted before the run, and counted in its first step.

use super::plan::Plan;
use crate::units::bytes;
use burn_megatron::train::{MeasuredMemory, RankMemory};

/// As many ranks get a row each; of more, the fullest of each place in the pipeline.
const MOST_ROWS: usize = 16;

/// The largest rank's prediction, in one line.
pub fn planned(plan: &Plan) -> String {
    let pp = plan.resolved.layout().grid.sizes().pp;
    let all = (0..pp).map(|rank| plan.resolved.rank_memory(rank));
    let largest = all.max_by_key(total).unwrap_or_default();
    format!(
        "{} a rank: weights {}, gradients {}, optimizer {}, activations {}{}",
        bytes(total(&largest)),
        bytes(largest.weights),
        bytes(largest.gradients),
        bytes(largest.optimizer),
        bytes(largest.activations),
        match pp {
            1 => "",
            _ => ", on the largest",
        }
    )
}

fn total(memory: &RankMemory) -> u64 {
    memory.weights + memory.gradients + memory.optimizer + memory.activations
}

/// A row for each rank, what was predicted beside what was counted.
pub fn table(plan: &Plan, measured: &[MeasuredMemory]) -> Vec<String> {
    let grid = &plan.resolved.layout().grid;
    let place = |rank: usize| grid.coords(rank).pp;
    let ranks: Vec<usize> = match measured.len() <= MOST_ROWS {
        true => (0..measured.len()).collect(),
        false => {
            let fullest = |at: usize| {
                let here = (0..measured.len()).filter(|rank| place(*rank) == at);
                here.max_by_key(|rank| measured[*rank].peak)
            };
            (0..grid.sizes().pp).filter_map(fullest).collect()
        }
    };
    let head = [
        "rank",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "peak of the step",
    ];
    let mut rows = vec![head.map(String::from)];
    rows.extend(ranks.into_iter().map(|rank| {
        let (want, got) = (plan.resolved.rank_memory(place(rank)), &measured[rank]);
        let both = |part: fn(&RankMemory) -> u64| {
            format!("{} / {}", bytes(part(&want)), bytes(part(&got.parts)))
        };
        [
            rank.to_string(),
            both(|memory| memory.weights),
            both(|memory| memory.gradients),
            both(|memory| memory.optimizer),
            both(|memory| memory.activations),
            bytes(got.peak),
        ]
    }));
    let title = "memory of each rank, predicted / counted by the allocator in the first step:";
    std::iter::once(title.to_string())
        .chain(aligned(&rows))
        .collect()
}

/// The rows with their columns below one another.
fn aligned<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.len());
        }
    }
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths);
        let padded = cells.map(|(cell, width)| format!("{cell:<width$}"));
        let line = padded.fold(String::new(), |line, cell| line + "  " + &cell);
        line.trim_end().to_string()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::aligned;

    #[test]
    fn columns_stand_below_one_another() {
        let rows = [["rank", "weights"], ["12", "1 MB"], ["0", "x"]];
        let rows = rows.map(|row| row.map(String::from));
        assert_eq!(
            aligned(&rows),
            ["  rank  weights", "  12    1 MB", "  0     x"]
        );
    }
}
