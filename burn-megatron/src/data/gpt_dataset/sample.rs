//! One sample: inputs, labels, and what goes with them.

use super::GptDatasetConfig;

/// One training sample; every vector has `s` (`seq_length`) elements.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Input token ids; padding is 0.
    pub tokens: Vec<i64>,
    /// The token that follows each input; padding is 0.
    pub labels: Vec<i64>,
    /// 1 where the loss counts, 0 on padding (and on end-of-document inputs with `eod_mask_loss`).
    pub loss_mask: Vec<f32>,
    /// Positions, from 0 (and from 0 again after each document with `reset_position_ids`).
    pub position_ids: Vec<i64>,
}

impl Sample {
    /// Cuts raw text (`s + 1` tokens, or `s` without the extra one) into a sample: Megatron's
    /// `GPTDataset.__getitem__` and `_get_ltor_masks_and_position_ids`.
    pub(super) fn new(text: Vec<i64>, config: &GptDatasetConfig) -> Self {
        let pad = config.pad();
        let mut labels: Vec<i64> = text.iter().skip(1).copied().collect();
        let mut tokens = text;
        if config.add_extra_token_to_sequence {
            tokens.pop();
        } else {
            labels.push(pad);
        }
        let is_eod = |token: &i64| Some(*token) == config.eod_token;
        let loss_mask = tokens.iter().zip(&labels).map(|(token, label)| {
            let masked = *label == pad || (config.eod_mask_loss && is_eod(token));
            if masked { 0.0 } else { 1.0 }
        });
        let loss_mask = loss_mask.collect();
        let mut position = 0;
        let position_ids = tokens
            .iter()
            .map(|token| {
                let this = position;
                let restart = config.reset_position_ids && is_eod(token);
                position = if restart { 0 } else { position + 1 };
                this
            })
            .collect();
        // The embedding must be able to look every id up, padding too.
        for ids in [&mut tokens, &mut labels] {
            ids.iter_mut()
                .filter(|id| **id == pad)
                .for_each(|id| *id = 0);
        }
        Self {
            tokens,
            labels,
            loss_mask,
            position_ids,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_and_document_ends_are_masked() {
        let mut config = GptDatasetConfig::new(5, 0, None);
        config.eod_token = Some(9);
        config.eod_mask_loss = true;
        config.reset_position_ids = true;
        let sample = Sample::new(vec![4, 9, 5, 6, -1, -1], &config);
        assert_eq!(sample.tokens, [4, 9, 5, 6, 0]);
        assert_eq!(sample.labels, [9, 5, 6, 0, 0]);
        assert_eq!(sample.loss_mask, [1.0, 0.0, 1.0, 0.0, 0.0]);
        assert_eq!(sample.position_ids, [0, 1, 0, 1, 2]);
    }

    #[test]
    fn without_the_extra_token_the_last_label_is_masked() {
        let mut config = GptDatasetConfig::new(3, 0, None);
        config.add_extra_token_to_sequence = false;
        let sample = Sample::new(vec![4, 5, 6], &config);
        assert_eq!(sample.tokens, [4, 5, 6]);
        assert_eq!(sample.labels, [5, 6, 0]);
        assert_eq!(sample.loss_mask, [1.0, 1.0, 0.0]);
    }
}
