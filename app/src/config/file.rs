//! Reading the TOML file, and writing the resolved one beside the run.

use super::RunConfig;
use crate::error::{Failure, Result};
use std::path::Path;

/// Reads a file in which every key must be one we know: a misspelt key would otherwise leave a
/// default in force without a word.
pub fn read(path: &Path) -> Result<RunConfig> {
    let text = std::fs::read_to_string(path).map_err(|e| Failure::io(path, &e))?;
    toml::from_str(&text).map_err(|error| {
        Failure::usage(
            format!("{}: {}", path.display(), error.to_string().trim_end()),
            "correct that line; `megatron train --help` lists the values under the same names",
        )
    })
}

impl RunConfig {
    /// Writes the configuration so that `--config` runs the same again. The run's own folder is
    /// left out: the next run needs one of its own.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut config = self.clone();
        config.logging.run_dir = None;
        let text = toml::to_string(&config)
            .map_err(|error| Failure::run(error.to_string(), "report this: it is a bug"))?;
        std::fs::write(path, text).map_err(|e| Failure::io(path, &e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<RunConfig> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn every_committed_config_loads() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        let mut loaded = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|ending| ending == "toml") {
                read(&path).unwrap_or_else(|failure| panic!("{failure}"));
                loaded += 1;
            }
        }
        assert!(loaded >= 3, "only {loaded} configs");
    }

    #[test]
    fn a_saved_config_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let mut config = RunConfig::default();
        config.model.ffn_hidden_size = Some(12);
        config.data.data_path = vec!["0.3".into(), "a".into()];
        config.optimizer.lr = 1.0e-3;
        config.save(&path).unwrap();
        assert_eq!(read(&path).unwrap(), config);
    }

    #[test]
    fn an_unknown_key_is_named_with_its_file_and_line() {
        let message = read_text("[model]\nnum_layer = 2\n")
            .unwrap_err()
            .to_string();
        for part in ["run.toml", "line 2", "num_layer", "num_layers"] {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
}
