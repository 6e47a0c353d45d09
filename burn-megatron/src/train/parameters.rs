//! The parameters between two steps: from the ranks that own them to every model.

use super::Trainer;
use crate::error::Result;
use crate::grads::OverlappedGather;
use crate::models::Stage;
use crate::shard::{FlatBuffer, ShardedModel, upload};
use burn::module::Module;
use burn::tensor::{Device, Tensor};

impl<M: Stage> Trainer<M> {
    /// Waits for updated parameters that are on their way from other ranks, as the next forward would.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn wait_for_parameters(&mut self) -> Result<()> {
        self.arriving
            .take()
            .map_or(Ok(()), OverlappedGather::finish)
    }

    /// Takes what the model shares with the optimizer from it, to be changed in place and
    /// [published](Trainer::publish_values).
    pub(super) fn take_values(&mut self) {
        if self.shares_values {
            self.model.let_go();
            let values = std::mem::take(&mut self.values).into_host();
            self.values = FlatBuffer::Host(values);
        }
    }

    /// Gives the model the values that the ranks of the data-parallel group own: `rounded` holds those of this rank in
    /// the model's type, if the device has made them.
    pub(super) fn publish_values(&mut self, rounded: Option<Tensor<1>>) -> Result<()> {
        if self.shares_values {
            let values = std::mem::take(&mut self.values).into_host();
            self.values = share(&mut self.model, values);
            return Ok(());
        }
        let dp = &self.context.groups.dp.comm;
        if let (Some(background), true) = (
            &self.background,
            self.config.data_parallel.overlap_param_gather,
        ) {
            let (packed, data_parallel) = (self.values.host(), &self.data_parallel);
            let arriving = OverlappedGather::start(data_parallel, &packed, background, dp);
            self.model
                .map_chunks(|chunk, params| arriving.give(chunk, params));
            self.arriving = Some(arriving);
            return Ok(());
        }
        let owns_all = self.values.len() == self.model.num_elements();
        if let (FlatBuffer::Device(values), true) = (&self.values, owns_all) {
            let round = || values.clone().cast(self.model.precision().float_dtype());
            let rounded = rounded.unwrap_or_else(round);
            self.model.set_values_on_device(rounded);
            return Ok(());
        }
        // Between steps the gradients are used up: their buffer takes the parameters.
        let packed = self.values.host();
        let mut spare = Vec::new();
        let parameters = match &mut self.gradients {
            FlatBuffer::Host(gradients) => gradients,
            FlatBuffer::Device(_) => {
                spare.resize(self.model.num_elements(), 0.0);
                &mut spare
            }
        };
        self.data_parallel.gather(&packed, parameters, &**dp)?;
        self.model.set_values(parameters);
        Ok(())
    }
}

/// Makes the parameters views of `values`, all of them in flat order, on the host.
pub(super) fn share<M: Module>(model: &mut ShardedModel<M>, values: Vec<f32>) -> FlatBuffer {
    let values = upload(values, &Device::flex());
    model.set_values_on_device(values.clone());
    FlatBuffer::Device(values)
}
