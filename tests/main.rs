//! Layouts against one rank and against Megatron's own runs; the library as a user sees it.

mod fixture_runs;
