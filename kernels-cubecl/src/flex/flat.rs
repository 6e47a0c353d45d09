//! AdamW over flat buffers.

use super::{Values, owned};
use crate::adamw::{AdamWFactors, update};
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

/// Elements that one task takes.
const CHUNK: usize = 1 << 14;

/// In place where nobody else holds the buffers.
pub fn adamw(
    state: [FlexTensor; 3],
    gradients: &FlexTensor,
    factors: &AdamWFactors,
    dtype: DType,
) -> ([FlexTensor; 3], FlexTensor) {
    let gradients = Values::of(gradients);
    let mut state = state.map(owned);
    let buffers = state.each_mut().map(|x| x.try_storage_mut::<f32>());
    let [Some(values), Some(first), Some(second)] = buffers else {
        unreachable!("each is the buffer's only holder");
    };
    let moments = first
        .par_chunks_mut(CHUNK)
        .zip(second.par_chunks_mut(CHUNK));
    let all = values
        .par_chunks_mut(CHUNK)
        .zip(gradients.par_chunks(CHUNK));
    all.zip(moments)
        .for_each(|((values, gradients), (first, second))| {
            update(values, gradients, first, second, *factors);
        });
    let weights = Flex::float_cast(state[0].clone(), dtype.into());
    (state, weights)
}
