//! Text from a trained model, one token at a time.

use super::Trainer;
use super::passes::{from_bytes, to_bytes};
use crate::dropout::PassContext;
use crate::error::Result;
use crate::layers::Sublayer;
use crate::models::gpt::GptModel;
use crate::models::{Stage, StageInput};
use crate::random;
use crate::shard::{f32s, host_data};
use burn::module::Module;
use burn::tensor::{Tensor, TensorData};

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token always.
    pub temperature: f64,
    /// Choose among the likeliest `top_k` only; 0 for all.
    pub top_k: usize,
    pub seed: u64,
}

impl<N: Sublayer, A: Sublayer, M: Sublayer> Trainer<GptModel<N, A, M>> {
    /// Continues `prompt` by up to `max_new_tokens`, and returns the new tokens. Every rank of the
    /// tensor- and pipeline-parallel groups calls it, and gets the same. The model sees at most its
    /// positions: the latest ones.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn generate(
        &self,
        prompt: &[i64],
        max_new_tokens: usize,
        sampling: &Sampling,
    ) -> Result<Vec<i64>> {
        let chunks: Vec<_> = self.model().chunks().iter().map(Module::valid).collect();
        let parts = self.sequence_parts();
        let window = chunks[0].max_position_embeddings() / parts * parts;
        let pp = &self.context().groups.pp.comm;
        let mut tokens = if prompt.is_empty() {
            vec![0]
        } else {
            prompt.to_vec()
        };
        let start = tokens.len();
        for _ in 0..max_new_tokens {
            let seen = &tokens[tokens.len().saturating_sub(window)..];
            // The last stage chooses for all.
            let mut chosen = match self.next_token_logits(&chunks, seen)? {
                Some(logits) => [choose(&logits, sampling, tokens.len() as u64)],
                None => [0],
            };
            pp.broadcast(bytemuck::cast_slice_mut(&mut chosen), pp.size() - 1)?;
            tokens.extend(chosen);
        }
        Ok(tokens.split_off(start))
    }

    /// Runs the rank's stages on one sample: the logits of the token after the last of `seen`, on
    /// the last stage.
    fn next_token_logits(
        &self,
        chunks: &[GptModel<N, A, M>],
        seen: &[i64],
    ) -> Result<Option<Vec<f32>>> {
        let pp = &self.context().groups.pp.comm;
        let device = self.context().device.clone().inner();
        let precision = self.model().precision();
        let (rank, ranks, stages) = (pp.rank(), pp.size(), pp.size() * chunks.len());
        // What follows the last token changes nothing before it, and lets the sequence divide.
        let parts = self.sequence_parts();
        let mut padded = seen.to_vec();
        padded.resize(seen.len().next_multiple_of(parts), 0);
        for (i, chunk) in chunks.iter().enumerate() {
            let stage = i * ranks + rank;
            let input = if stage == 0 {
                let tokens = TensorData::new(padded.clone(), [1, padded.len()]);
                StageInput::Tokens(Tensor::from_data(tokens, &device))
            } else {
                let shape = [padded.len() / parts, 1, chunk.hidden_size()];
                let bytes = precision.bytes() * shape.iter().product::<usize>();
                let bytes = pp.receive(bytes, (rank + ranks - 1) % ranks)?;
                StageInput::Hidden(from_bytes(&bytes, shape, precision, &device))
            };
            let hidden = chunk.forward(input, &PassContext::evaluation());
            if stage + 1 == stages {
                let logits = chunk.next_token_logits(hidden, seen.len() - 1);
                return Ok(Some(f32s(&host_data(logits)).to_vec()));
            }
            pp.send(to_bytes(hidden), (rank + 1) % ranks)?;
        }
        Ok(None)
    }
}

/// The index of the chosen logit; `draw` numbers the random draw.
fn choose(logits: &[f32], sampling: &Sampling, draw: u64) -> i64 {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // Ties go to the lower id, on every rank.
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if sampling.temperature <= 0.0 {
        return order.first().map_or(0, |&id| id as i64);
    }
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let best = order.first().map_or(0.0, |&id| f64::from(logits[id]));
    let weight = |id: usize| ((f64::from(logits[id]) - best) / sampling.temperature).exp();
    let total: f64 = order.iter().map(|&id| weight(id)).sum();
    let mut left = random::uniform_at(sampling.seed, random::stream_of("generate"), draw) * total;
    for &id in &order {
        left -= weight(id);
        if left <= 0.0 {
            return id as i64;
        }
    }
    order.last().map_or(0, |&id| id as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_largest_and_top_1_agrees() {
        let logits = [0.1, 3.0, -1.0, 3.0];
        for (temperature, top_k) in [(0.0, 0), (1.0, 1)] {
            let sampling = Sampling {
                temperature,
                top_k,
                seed: 1,
            };
            assert_eq!(choose(&logits, &sampling, 5), 1);
        }
    }

    #[test]
    fn draws_follow_the_softmax() {
        let sampling = Sampling {
            temperature: 1.0,
            top_k: 0,
            seed: 3,
        };
        let logits = [0.0, 2f32.ln()];
        let ones: i64 = (0..3000).map(|draw| choose(&logits, &sampling, draw)).sum();
        assert!(
            (1850..2150).contains(&ones),
            "{ones} of 3000, expected about 2000"
        );
    }
}
