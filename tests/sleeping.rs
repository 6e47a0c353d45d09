//! Work for a pipeline that only takes time.

use burn_megatron::pipeline::Work;
use burn_megatron::prelude::*;
use std::thread;
use std::time::Duration;

/// A stage whose passes take a fixed time and no core: two cores can host many ranks of it.
pub struct Sleeping {
    /// The pipeline's last stage.
    pub last: usize,
    pub forward: Duration,
    pub backward: Duration,
    /// Fails in this backward, as (stage, micro batch).
    pub dies_at: Option<(usize, usize)>,
}

impl Work for Sleeping {
    fn message_bytes(&self) -> usize {
        16
    }

    fn forward(
        &mut self,
        stage: usize,
        mb: usize,
        input: Option<Vec<u8>>,
    ) -> Result<Option<Vec<u8>>> {
        assert_eq!(input.is_none(), stage == 0);
        if let Some(input) = input {
            assert_eq!(
                input,
                vec![mb as u8; 16],
                "stage {stage} got another micro batch"
            );
        }
        thread::sleep(self.forward);
        Ok((stage != self.last).then(|| vec![mb as u8; 16]))
    }

    fn backward(
        &mut self,
        stage: usize,
        mb: usize,
        dy: Option<Vec<u8>>,
    ) -> Result<Option<Vec<u8>>> {
        assert_eq!(dy.is_none(), stage == self.last);
        if let Some(dy) = dy {
            assert_eq!(
                dy,
                vec![mb as u8; 16],
                "stage {stage} got another micro batch"
            );
        }
        assert!(self.dies_at != Some((stage, mb)), "the power is out");
        thread::sleep(self.backward);
        Ok((stage != 0).then(|| vec![mb as u8; 16]))
    }
}

/// A pipeline of `pp` ranks and nothing else.
pub fn pipeline_grid(pp: usize) -> RankGrid {
    let axes = Axes { pp, ..Axes::all(1) };
    RankGrid::new(axes, DEFAULT_ORDER).expect("a grid")
}
