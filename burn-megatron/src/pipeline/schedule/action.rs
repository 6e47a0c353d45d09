//! One thing that a pipeline rank does, and its short form.

use crate::error::{ErrorKind, Violation};
use std::fmt;
use std::str::FromStr;

/// What an action does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Runs the stage on a micro batch.
    Forward,
    /// Runs the stage's backward.
    Backward,
    /// Sends the activations of a forward to the next stage.
    SendForward,
    /// Receives the activations that a forward starts from.
    ReceiveForward,
    /// Sends the gradient of a stage's input to the stage before.
    SendBackward,
    /// Receives the gradient that a backward starts from.
    ReceiveBackward,
}

impl Kind {
    const ALL: [(Kind, &str); 6] = [
        (Kind::SendForward, "SEND_F"),
        (Kind::ReceiveForward, "RECV_F"),
        (Kind::SendBackward, "SEND_B"),
        (Kind::ReceiveBackward, "RECV_B"),
        (Kind::Forward, "F"),
        (Kind::Backward, "B"),
    ];

    /// Whether the rank computes, rather than communicates.
    pub fn computes(self) -> bool {
        matches!(self, Kind::Forward | Kind::Backward)
    }

    fn name(self) -> &'static str {
        let of = Kind::ALL.iter().find(|(kind, _)| *kind == self);
        of.map_or("", |(_, name)| name)
    }
}

/// One action of one rank, on one of its stages. Its short form is the stage, the kind and the
/// micro batch: `2F0` is stage 2's forward of micro batch 0, `2SEND_F0` sends what it made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The rank's stage that acts, numbered over the whole pipeline.
    pub stage: usize,
    pub kind: Kind,
    pub microbatch: usize,
}

impl Action {
    /// An action.
    pub fn new(stage: usize, kind: Kind, microbatch: usize) -> Self {
        Action {
            stage,
            kind,
            microbatch,
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.name(), self.microbatch)
    }
}

impl FromStr for Action {
    type Err = crate::Error;

    fn from_str(text: &str) -> Result<Self, crate::Error> {
        let parse = || {
            let (kind, at, name) = Kind::ALL
                .iter()
                .find_map(|(kind, name)| Some((*kind, text.find(name)?, name)))?;
            let stage = number(&text[..at])?;
            let microbatch = number(&text[at + name.len()..])?;
            Some(Action::new(stage, kind, microbatch))
        };
        parse().ok_or_else(|| {
            let violation = Violation {
                rule: format!("\"{text}\" is no action of a pipeline"),
                nearest: ["2F0", "2B0", "2SEND_F0", "2RECV_B0"]
                    .map(String::from)
                    .to_vec(),
            };
            ErrorKind::Config(vec![violation]).into()
        })
    }
}

/// Digits alone: `parse` would also take a sign.
fn number(text: &str) -> Option<usize> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_action_reads_back(stage in 0usize..99, kind in 0usize..6, microbatch in 0usize..999) {
            let action = Action::new(stage, Kind::ALL[kind].0, microbatch);
            prop_assert_eq!(action.to_string().parse::<Action>().unwrap(), action);
        }
    }

    #[test]
    fn short_forms() {
        assert_eq!(Action::new(2, Kind::Forward, 0).to_string(), "2F0");
        assert_eq!(
            Action::new(1, Kind::ReceiveBackward, 12).to_string(),
            "1RECV_B12"
        );
        for text in ["", "F", "2F", "F0", "2X0", "-2F0", "2F+1", "2FF0", "2F0 "] {
            let error = text.parse::<Action>().unwrap_err().to_string();
            assert!(error.contains("no action"), "{text}: {error}");
        }
    }
}
