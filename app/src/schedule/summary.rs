//! What a schedule costs: the bubble, the memory, the time, the messages.

use super::Planned;
use super::numbers::{percent, short};

/// The most ranks whose numbers are all written out.
const MANY_RANKS: usize = 16;

/// One line: which schedule it is, and its bubble.
pub fn title(planned: &Planned) -> String {
    let shape = planned.schedule.shape();
    let chunks = match shape.virtual_stages {
        1 => String::new(),
        v => format!(", v = {v}"),
    };
    format!(
        "{}: p = {}{chunks}, m = {}; bubble {} of compute time",
        planned.kind,
        shape.ranks,
        shape.microbatches,
        percent(planned.timeline.bubble())
    )
}

/// The lines under the table.
pub fn lines(planned: &Planned) -> String {
    let (schedule, timeline) = (&planned.schedule, &planned.timeline);
    let shape = schedule.shape();
    let (p, v, m) = (shape.ranks, shape.virtual_stages, shape.microbatches);
    let (divisor, number, held) = match v {
        1 => ("m", m.to_string(), "micro batches"),
        _ => ("(v*m)", format!("({v}*{m})"), "micro batches of a chunk"),
    };
    let ranks = match p {
        1 => String::from("rank 0"),
        _ => format!("ranks 0 to {}", p - 1),
    };
    let times = planned.times;
    let ideal = (v * m) as f64 * (times.forward + times.backward);
    let in_flight = per_rank(p, |rank| schedule.max_in_flight(rank));
    let messages = per_rank(p, |rank| schedule.sends(rank));
    format!(
        "bubble     {} of compute time; (p-1)/{divisor} = {}/{number} = {}\n\
         in flight  at most {in_flight} {held} on {ranks}; gpipe holds {} on each\n\
         makespan   {} units; {} if no rank idled\n\
         messages   {messages} sent by {ranks}\n",
        percent(timeline.bubble()),
        p - 1,
        percent(shape.equal_bubble()),
        m * v,
        short(timeline.makespan()),
        short(ideal),
    )
}

/// The ranks' numbers: `4 3 2 1`; of many ranks the first and the last ones.
fn per_rank(ranks: usize, of: impl Fn(usize) -> usize) -> String {
    let join = |range: std::ops::Range<usize>| {
        let numbers: Vec<String> = range.map(|rank| of(rank).to_string()).collect();
        numbers.join(" ")
    };
    match ranks {
        0..=MANY_RANKS => join(0..ranks),
        _ => format!("{} .. {}", join(0..4), join(ranks - 4..ranks)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::planned;
    use super::*;
    use burn_megatron::topology::PipelineSchedule;

    #[test]
    fn the_bubble_is_the_formulas() {
        let one = lines(&planned(PipelineSchedule::OneForwardOneBackward, 4, 16, 1));
        assert_eq!(
            one,
            "bubble     18.8% of compute time; (p-1)/m = 3/16 = 18.8%\n\
             in flight  at most 4 3 2 1 micro batches on ranks 0 to 3; gpipe holds 16 on each\n\
             makespan   57 units; 48 if no rank idled\n\
             messages   16 32 32 16 sent by ranks 0 to 3\n"
        );
        let two = lines(&planned(PipelineSchedule::Interleaved, 4, 8, 2));
        assert!(two.contains("bubble     18.8%"), "{two}");
        assert!(two.contains("(p-1)/(v*m) = 3/(2*8) = 18.8%"), "{two}");
        assert!(two.contains("gpipe holds 16"), "{two}");
    }

    #[test]
    fn many_ranks_take_one_line() {
        let text = lines(&planned(PipelineSchedule::OneForwardOneBackward, 32, 32, 1));
        assert!(
            text.contains("at most 32 31 30 29 .. 4 3 2 1 micro"),
            "{text}"
        );
    }
}
