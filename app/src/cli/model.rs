//! Flags of the model and of how it is split over ranks.

use super::{by_name, set, set_some};
use burn_megatron::Kernels;
use burn_megatron::grads::DataParallelConfig;
use burn_megatron::layers::{Normalization, RecomputeGranularity, RecomputeMethod};
use burn_megatron::models::gpt::{GptConfig, PositionEmbeddingType};
use burn_megatron::topology::{ParallelConfig, PipelineSchedule};
use clap::Args;

/// Shape of the GPT.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Transformer layers [default: 4]
    #[arg(long, value_name = "N")]
    num_layers: Option<usize>,
    /// Width of the residual stream; a multiple of the attention heads [default: 128]
    #[arg(long, value_name = "N")]
    hidden_size: Option<usize>,
    /// Attention heads; each is hidden size / heads wide [default: 4]
    #[arg(long, value_name = "N")]
    num_attention_heads: Option<usize>,
    /// Heads of keys and values, each serving as many attention heads; a multiple of the
    /// tensor-parallel size [default: the attention heads]
    #[arg(long, value_name = "N")]
    num_query_groups: Option<usize>,
    /// Width of an attention head [default: hidden size / heads]
    #[arg(long, value_name = "N")]
    kv_channels: Option<usize>,
    /// Inner width of the MLP [default: 4 x hidden size; with --swiglu two thirds of that, down to a
    /// multiple of 64]
    #[arg(long, value_name = "N")]
    ffn_hidden_size: Option<usize>,
    /// LayerNorm, or RMSNorm as in Llama [default: LayerNorm]
    #[arg(long, value_name = "NAME", value_parser = by_name::<Normalization>)]
    normalization: Option<Normalization>,
    /// How tokens know their place: learned_absolute, rope (rotary, as in Llama) or none
    /// [default: learned_absolute]
    #[arg(long, value_name = "NAME", value_parser = by_name::<PositionEmbeddingType>)]
    position_embedding_type: Option<PositionEmbeddingType>,
    /// Rotary: base of the frequencies [default: 10000]
    #[arg(long, value_name = "X")]
    rotary_base: Option<f64>,
    /// Rotary: part of each head's features that turn [default: 1]
    #[arg(long, value_name = "X")]
    rotary_percent: Option<f64>,
    /// Rotary: stretch low frequencies as Llama 3 does
    #[arg(long)]
    use_rope_scaling: bool,
    /// Rotary: by how much [default: 8]
    #[arg(long, value_name = "X")]
    rope_scaling_factor: Option<f64>,
    /// Gate the MLP by SiLU, as Llama does, instead of applying GELU
    #[arg(long)]
    swiglu: bool,
    /// Square the MLP's ReLU instead of applying GELU
    #[arg(long)]
    squared_relu: bool,
    /// Linear layers without biases, as in Llama
    #[arg(long)]
    disable_bias_linear: bool,
    /// Normalise the queries and keys of each head
    #[arg(long)]
    qk_layernorm: bool,
    /// Part of what attention, MLP and embeddings give that is dropped in training, the same elements
    /// in every layout [default: 0]
    #[arg(long, value_name = "P")]
    hidden_dropout: Option<f64>,
    /// Part of the attention's probabilities that is dropped in training [default: 0]
    #[arg(long, value_name = "P")]
    attention_dropout: Option<f64>,
    /// Compute again in the backward instead of keeping, for less memory: selective (the attention's
    /// probabilities) or full (whole layers) [default: nothing]
    #[arg(long, value_name = "NAME", value_parser = by_name::<RecomputeGranularity>)]
    recompute_granularity: Option<RecomputeGranularity>,
    /// Full: uniform (all layers, in groups that keep their input alone) or block (the first layers of
    /// each stage, the others keep everything) [default: uniform]
    #[arg(long, value_name = "NAME", value_parser = by_name::<RecomputeMethod>)]
    recompute_method: Option<RecomputeMethod>,
    /// Full: layers of a group (uniform), or of each stage (block) [default: 1]
    #[arg(long, value_name = "N")]
    recompute_num_layers: Option<usize>,
    /// Longest sequence the learned positions reach, in tokens [default: the sequence length]
    #[arg(long, value_name = "N")]
    max_position_embeddings: Option<usize>,
    /// Added to the variance in norms, against division by zero [default: 1e-5]
    #[arg(long, value_name = "X", alias = "norm-epsilon")]
    layernorm_epsilon: Option<f64>,
    /// Standard deviation of the initial weights; the layers' output projections get it divided by
    /// sqrt(2 x layers) [default: 0.02]
    #[arg(long, value_name = "X")]
    init_method_std: Option<f64>,
    /// Give the output layer weights of its own instead of the word embedding's
    #[arg(long)]
    untie_embeddings_and_output_weights: bool,
    /// Use the exact (erf) GELU instead of the tanh form that Megatron's fused kernel computes
    #[arg(long)]
    no_bias_gelu_fusion: bool,
    /// What the layers compute with: auto (fused kernels where there are any for the type), fused (an error where there
    /// are none) or local (primitives of Burn's backend) [default: auto]
    #[arg(long, value_name = "NAME", value_parser = by_name::<Kernels>)]
    transformer_impl: Option<Kernels>,
    /// Pad the vocabulary to a multiple of this times the tensor-parallel size; the padding takes no
    /// probability [default: 128]
    #[arg(long, value_name = "N")]
    make_vocab_size_divisible_by: Option<usize>,
}

impl ModelArgs {
    pub fn apply(&self, model: &mut GptConfig) {
        set(&mut model.num_layers, &self.num_layers);
        set(&mut model.hidden_size, &self.hidden_size);
        set(&mut model.num_attention_heads, &self.num_attention_heads);
        set_some(&mut model.num_query_groups, &self.num_query_groups);
        set_some(&mut model.kv_channels, &self.kv_channels);
        set_some(&mut model.ffn_hidden_size, &self.ffn_hidden_size);
        set(&mut model.normalization, &self.normalization);
        set(
            &mut model.position_embedding_type,
            &self.position_embedding_type,
        );
        set(&mut model.rotary_base, &self.rotary_base);
        set(&mut model.rotary_percent, &self.rotary_percent);
        model.use_rope_scaling |= self.use_rope_scaling;
        set(&mut model.rope_scaling_factor, &self.rope_scaling_factor);
        model.swiglu |= self.swiglu;
        model.squared_relu |= self.squared_relu;
        model.disable_bias_linear |= self.disable_bias_linear;
        model.qk_layernorm |= self.qk_layernorm;
        set(&mut model.hidden_dropout, &self.hidden_dropout);
        set(&mut model.attention_dropout, &self.attention_dropout);
        set_some(
            &mut model.recompute_granularity,
            &self.recompute_granularity,
        );
        set_some(&mut model.recompute_method, &self.recompute_method);
        set_some(&mut model.recompute_num_layers, &self.recompute_num_layers);
        set_some(
            &mut model.max_position_embeddings,
            &self.max_position_embeddings,
        );
        set(&mut model.layernorm_epsilon, &self.layernorm_epsilon);
        set(&mut model.init_method_std, &self.init_method_std);
        model.untie_embeddings_and_output_weights |= self.untie_embeddings_and_output_weights;
        model.bias_gelu_fusion &= !self.no_bias_gelu_fusion;
        set(&mut model.transformer_impl, &self.transformer_impl);
        set(
            &mut model.make_vocab_size_divisible_by,
            &self.make_vocab_size_divisible_by,
        );
    }
}

/// How the ranks share the work.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Parallelism")]
pub struct ParallelArgs {
    /// Ranks that split every layer's weights between them; divides the attention heads [default: 1]
    #[arg(long, value_name = "N")]
    tensor_model_parallel_size: Option<usize>,
    /// Split norms, residuals and embeddings along the sequence over the tensor-parallel ranks, which
    /// divide its length: less memory for the same communication
    #[arg(long)]
    sequence_parallel: bool,
    /// Ranks that split the layers between them, one stage of the model each; divides the layers
    /// [default: 1]
    #[arg(long, value_name = "N")]
    pipeline_model_parallel_size: Option<usize>,
    /// Stages on each pipeline rank, for the interleaved schedule: a smaller bubble, more messages
    /// [default: 1]
    #[arg(long, value_name = "N")]
    num_virtual_stages_per_pipeline_rank: Option<usize>,
    /// The same, said as the layers of one virtual stage
    #[arg(long, value_name = "N")]
    num_layers_per_virtual_pipeline_stage: Option<usize>,
    /// Order of forwards and backwards: gpipe, 1f1b or interleaved; `megatron schedule` draws them
    /// [default: 1f1b; interleaved with virtual stages]
    #[arg(long, value_name = "NAME", value_parser = by_name::<PipelineSchedule>)]
    pipeline_schedule: Option<PipelineSchedule>,
    /// Interleaved: micro batches in a row through one virtual stage [default: the pipeline size]
    #[arg(long, value_name = "N")]
    microbatch_group_size_per_virtual_pipeline_stage: Option<usize>,
    /// Layers of the first pipeline rank, where they are not to be an equal share
    #[arg(long, value_name = "N")]
    decoder_first_pipeline_num_layers: Option<usize>,
    /// Layers of the last pipeline rank, likewise
    #[arg(long, value_name = "N")]
    decoder_last_pipeline_num_layers: Option<usize>,
    /// Count the embedding as a layer when the layers are divided: the first stage gets one less
    #[arg(long)]
    account_for_embedding_in_pipeline_split: bool,
    /// Count the output layer and loss as a layer when the layers are divided: the last stage gets
    /// one less
    #[arg(long)]
    account_for_loss_in_pipeline_split: bool,
    /// Ranks in all, as threads of this process; what tensor and pipeline parallelism leave over
    /// becomes data parallelism [default: the tensor- times the pipeline-parallel size]
    #[arg(long, value_name = "N")]
    world_size: Option<usize>,
}

impl ParallelArgs {
    pub fn apply(&self, parallel: &mut ParallelConfig) {
        set(
            &mut parallel.tensor_model_parallel_size,
            &self.tensor_model_parallel_size,
        );
        parallel.sequence_parallel |= self.sequence_parallel;
        set(
            &mut parallel.pipeline_model_parallel_size,
            &self.pipeline_model_parallel_size,
        );
        // The two say one thing: a flag for either replaces whatever the file says.
        let virtual_stages = &mut parallel.num_virtual_stages_per_pipeline_rank;
        let layers = &mut parallel.num_layers_per_virtual_pipeline_stage;
        if self.num_virtual_stages_per_pipeline_rank.is_some()
            || self.num_layers_per_virtual_pipeline_stage.is_some()
        {
            *virtual_stages = self.num_virtual_stages_per_pipeline_rank;
            *layers = self.num_layers_per_virtual_pipeline_stage;
        }
        set_some(&mut parallel.pipeline_schedule, &self.pipeline_schedule);
        set_some(
            &mut parallel.microbatch_group_size_per_virtual_pipeline_stage,
            &self.microbatch_group_size_per_virtual_pipeline_stage,
        );
        set_some(
            &mut parallel.decoder_first_pipeline_num_layers,
            &self.decoder_first_pipeline_num_layers,
        );
        set_some(
            &mut parallel.decoder_last_pipeline_num_layers,
            &self.decoder_last_pipeline_num_layers,
        );
        parallel.account_for_embedding_in_pipeline_split |=
            self.account_for_embedding_in_pipeline_split;
        parallel.account_for_loss_in_pipeline_split |= self.account_for_loss_in_pipeline_split;
        set_some(&mut parallel.world_size, &self.world_size);
    }
}

/// What the data-parallel ranks do with gradients and parameters.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Parallelism")]
pub struct DataParallelArgs {
    /// Split the optimizer's state over the data-parallel ranks (ZeRO stage 1): each keeps and updates
    /// its part, with the same results for the same traffic
    #[arg(long)]
    use_distributed_optimizer: bool,
    /// Elements of the gradients that are reduced at a time [default: 40000000]
    #[arg(long, value_name = "N")]
    ddp_bucket_size: Option<usize>,
    /// Reduce each bucket of gradients as soon as it is complete, while the backward goes on
    #[arg(long)]
    overlap_grad_reduce: bool,
    /// Gather updated parameters in the background, and wait for each bucket where the next forward needs it;
    /// with --use-distributed-optimizer
    #[arg(long)]
    overlap_param_gather: bool,
    /// Gradients travel between the data-parallel ranks in bf16, at half the bytes; with --bf16
    #[arg(long)]
    grad_reduce_in_bf16: bool,
}

impl DataParallelArgs {
    pub fn apply(&self, config: &mut DataParallelConfig) {
        config.use_distributed_optimizer |= self.use_distributed_optimizer;
        set(&mut config.ddp_bucket_size, &self.ddp_bucket_size);
        config.overlap_grad_reduce |= self.overlap_grad_reduce;
        config.overlap_param_gather |= self.overlap_param_gather;
        config.grad_reduce_in_bf16 |= self.grad_reduce_in_bf16;
    }
}
