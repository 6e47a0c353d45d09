//! AdamW over flat buffers.

use super::{Values, owned};
use crate::adamw::{AdamWFactors, update};
use crate::flat::Ranges;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_flex::{Flex, FlexTensor};

/// In place where nobody else holds the buffers.
pub fn adamw(
    state: [FlexTensor; 3],
    gradients: &FlexTensor,
    factors: &AdamWFactors,
    decayed: &Ranges,
    dtype: DType,
) -> ([FlexTensor; 3], FlexTensor) {
    let gradients = Values::of(gradients);
    let mut state = state.map(owned);
    let buffers = state.each_mut().map(|x| x.try_storage_mut::<f32>());
    let [Some(values), Some(first), Some(second)] = buffers else {
        unreachable!("each is the buffer's only holder");
    };
    let spare = AdamWFactors {
        keep: 1.0,
        ..*factors
    };
    for (run, decays) in decayed.runs(gradients.len()) {
        update(
            &mut values[run.clone()],
            &gradients[run.clone()],
            &mut first[run.clone()],
            &mut second[run],
            if decays { *factors } else { spare },
        );
    }
    let weights = Flex::float_cast(state[0].clone(), dtype.into());
    (state, weights)
}
