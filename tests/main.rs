//! Layouts against one rank and against Megatron's own runs; the library as a user sees it.

mod checkpoints;
mod cross_entropy;
mod data_parallel;
mod fixture_runs;
mod launching;
mod layers;
mod mappings;
mod memory;
mod mixed_precision;
mod own_model;
mod pipeline;
