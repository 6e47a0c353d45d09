//! A timeline as Chrome's trace events, which Perfetto and chrome://tracing open.
//!
//! A track is a process, a rank is a thread of it, a forward or backward is a slice, and an arrow
//! leads from the computation that made a message to the one that starts from it. Format:
//! "Trace Event Format", `docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU`.

use burn_megatron::pipeline::{Action, Kind, Span, Timeline};
use burn_megatron::topology::PipelineShape;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// An arrow leaves this part of a slice before its end: at the very end it would bind to the next.
const BEFORE_END: f64 = 1e-3;

/// One timeline of a trace; it starts at 0, whatever its own clock says, so that several compare.
pub struct Track<'a> {
    /// What it is, such as `simulated` or `measured`.
    pub name: String,
    pub timeline: &'a Timeline,
    pub shape: &'a PipelineShape,
    /// One for each rank.
    pub rank_names: Vec<String>,
    /// The timeline's unit of time in microseconds.
    pub micros_per_unit: f64,
}

/// The trace, with `other` to say what it is of.
pub fn trace(tracks: &[Track], other: Map<String, Value>) -> Value {
    let mut events = Vec::new();
    let mut arrows = 0;
    for (index, track) in tracks.iter().enumerate() {
        let process = Process {
            track,
            // 0 is the idle process of a real system.
            id: index + 1,
            start: track.timeline.start(),
        };
        events.extend(process.names());
        events.extend(process.slices());
        for (from, to) in process.messages() {
            events.extend(process.arrow(arrows, &from, &to));
            arrows += 1;
        }
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ms", "otherData": other })
}

/// A track's process.
struct Process<'a> {
    track: &'a Track<'a>,
    id: usize,
    /// When its timeline starts, in its unit.
    start: f64,
}

impl Process<'_> {
    /// What the process and its threads are called, and their order.
    fn names(&self) -> Vec<Value> {
        let about = |thread: usize, what: &str, key: &str, value: Value| {
            json!({
                "ph": "M",
                "pid": self.id,
                "tid": thread,
                "name": what,
                "args": { key: value },
            })
        };
        let mut events = vec![
            about(0, "process_name", "name", json!(self.track.name)),
            about(0, "process_sort_index", "sort_index", json!(self.id)),
        ];
        for (rank, name) in self.track.rank_names.iter().enumerate() {
            let thread = thread_of(rank);
            events.push(about(thread, "thread_name", "name", json!(name)));
            let order = json!(rank);
            events.push(about(thread, "thread_sort_index", "sort_index", order));
        }
        events
    }

    /// One for each forward and backward.
    fn slices(&self) -> Vec<Value> {
        let slice = &|rank: usize, span: &Span| {
            let Action {
                stage,
                kind,
                microbatch,
            } = span.action;
            let chunk = self.track.shape.chunk_of(stage);
            // Two of chrome://tracing's own colours: blue and green.
            let (letter, category, colour) = match kind {
                Kind::Backward => ("B", "backward", "thread_state_running"),
                _ => ("F", "forward", "rail_response"),
            };
            json!({
                "ph": "X",
                "pid": self.id,
                "tid": thread_of(rank),
                "name": format!("{letter}{microbatch}"),
                "cat": category,
                "cname": colour,
                "ts": self.micros(span.start),
                "dur": span.duration() * self.track.micros_per_unit,
                "args": { "microbatch": microbatch, "chunk": chunk, "stage": stage },
            })
        };
        let of_rank = |rank| {
            let spans = self.track.timeline.compute(rank);
            spans.map(move |span| slice(rank, span))
        };
        let ranks = 0..self.track.timeline.ranks.len();
        ranks.flat_map(of_rank).collect()
    }

    /// The computations that a message leads from and to, where these are on two ranks.
    fn messages(&self) -> Vec<(Span, Span)> {
        let ranks = 0..self.track.timeline.ranks.len();
        let spans: Vec<&Span> = ranks
            .flat_map(|rank| self.track.timeline.compute(rank))
            .collect();
        let by_action: HashMap<Action, &Span> = spans.iter().map(|s| (s.action, *s)).collect();
        let reader = |made: &Span| {
            let Action {
                stage,
                kind,
                microbatch,
            } = made.action;
            let next = match kind {
                Kind::Backward => stage.checked_sub(1)?,
                _ => stage + 1,
            };
            let read = by_action.get(&Action::new(next, kind, microbatch))?;
            let apart = self.track.shape.rank_of(next) != self.track.shape.rank_of(stage);
            apart.then_some((*made, **read))
        };
        spans.into_iter().filter_map(reader).collect()
    }

    fn arrow(&self, id: usize, from: &Span, to: &Span) -> [Value; 2] {
        let end = |phase: &str, span: &Span, time: f64| {
            json!({
                "ph": phase,
                "bp": "e",
                "id": id,
                "pid": self.id,
                "tid": thread_of(self.track.shape.rank_of(span.action.stage)),
                "name": "message",
                "cat": "p2p",
                "ts": self.micros(time),
            })
        };
        let leaves = from.end - BEFORE_END * from.duration();
        [end("s", from, leaves), end("f", to, to.start)]
    }

    fn micros(&self, time: f64) -> f64 {
        (time - self.start) * self.track.micros_per_unit
    }
}

/// 0 is the idle thread of a real system.
fn thread_of(rank: usize) -> usize {
    rank + 1
}

#[cfg(test)]
mod tests {
    use super::super::planned;
    use super::*;
    use burn_megatron::topology::PipelineSchedule;

    #[test]
    fn a_slice_for_every_computation_and_an_arrow_for_every_message() {
        let planned = planned(PipelineSchedule::Interleaved, 4, 8, 2);
        let trace = planned.trace();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |phase: &'static str| events.iter().filter(move |event| event["ph"] == phase);
        assert_eq!(of("X").count(), 4 * 8 * 2 * 2);
        for rank in 0..4 {
            let on_rank = of("X").filter(|event| event["tid"] == rank + 1);
            let sum: f64 = on_rank.map(|event| event["dur"].as_f64().unwrap()).sum();
            assert_eq!(sum, 1000.0 * planned.timeline.busy(rank));
        }
        let sends: usize = (0..4).map(|rank| planned.schedule.sends(rank)).sum();
        assert_eq!(of("s").count(), sends);
        assert_eq!(of("f").count(), sends);
        assert_eq!(trace["displayTimeUnit"], "ms");
        assert!(
            trace["otherData"]["time"]
                .as_str()
                .unwrap()
                .contains("1 ms")
        );
        let first = of("X").next().unwrap();
        let about = json!({ "microbatch": 0, "chunk": 0, "stage": 0 });
        assert_eq!((&first["name"], &first["args"]), (&json!("F0"), &about));
    }

    #[test]
    fn tracks_start_together() {
        let planned = planned(PipelineSchedule::OneForwardOneBackward, 2, 2, 1);
        let mut later = planned.timeline.clone();
        for span in later.ranks.iter_mut().flatten() {
            span.start += 64.0;
            span.end += 64.0;
        }
        let track = |name: &str, timeline| Track {
            name: name.into(),
            timeline,
            shape: planned.schedule.shape(),
            rank_names: vec!["rank 0".into(), "rank 1".into()],
            micros_per_unit: 1.0,
        };
        let tracks = [
            track("simulated", &planned.timeline),
            track("measured", &later),
        ];
        let trace = trace(&tracks, Map::new());
        let events = trace["traceEvents"].as_array().unwrap();
        let times = |process: usize| -> Vec<f64> {
            let own = events.iter().filter(|event| event["pid"] == process);
            own.filter_map(|event| event["ts"].as_f64())
                .map(|time| (time * 1e6).round())
                .collect()
        };
        assert_eq!(times(1), times(2));
    }
}
