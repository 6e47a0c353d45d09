//! The fast way through GPT-2's pipeline: added tokens, then words, then the cache or the model.

use tokenizers::models::bpe::BPE;
use tokenizers::{
    Model, ModelWrapper, PostProcessor, PreTokenizerWrapper, Tokenizer as HfTokenizer,
};

use super::split_words::Splitter;
use super::word_cache::WordCache;

/// The parts of a byte-level BPE pipeline that texts meet before the model.
pub(super) struct ByteLevelBpe {
    added: AddedTokens,
    splitter: Splitter,
    /// The character that stands for each byte in the vocabulary.
    byte_chars: [char; 256],
}

impl ByteLevelBpe {
    /// The fast way for `tokenizer`, if its pipeline is exactly GPT-2's: no normaliser, byte-level
    /// with the pattern and without a leading blank, a BPE without dropout, nothing added behind.
    pub fn recognise(tokenizer: &HfTokenizer, include_special_tokens: bool) -> Option<Self> {
        let Some(PreTokenizerWrapper::ByteLevel(byte_level)) = tokenizer.get_pre_tokenizer() else {
            return None;
        };
        let bpe = model(tokenizer)?;
        let exact = tokenizer.get_normalizer().is_none()
            && byte_level.use_regex
            && !byte_level.add_prefix_space
            && bpe.dropout.is_none_or(|p| p == 0.0)
            && !tokenizer.get_encode_special_tokens()
            && tokenizer
                .get_post_processor()
                .is_none_or(|p| p.added_tokens(false) == 0)
            && (!include_special_tokens
                || tokenizer
                    .get_post_processor()
                    .is_none_or(|p| matches!(p, tokenizers::PostProcessorWrapper::ByteLevel(_))));
        let added = AddedTokens::new(tokenizer)?;
        exact.then(|| Self {
            added,
            splitter: Splitter::new(),
            byte_chars: byte_chars(),
        })
    }

    /// Appends the ids of `text`, as `tokenizer`, the one this was made from, gives them.
    ///
    /// # Errors
    /// The model's, for bytes it has no token for.
    pub fn encode(
        &self,
        tokenizer: &HfTokenizer,
        cache: &mut WordCache,
        text: &str,
        ids: &mut Vec<u32>,
    ) -> tokenizers::Result<()> {
        let mut rest = text;
        while let Some((start, end, id)) = self.added.find(rest) {
            self.encode_words(tokenizer, cache, &rest[..start], ids)?;
            ids.push(id);
            rest = &rest[end..];
        }
        self.encode_words(tokenizer, cache, rest, ids)
    }

    fn encode_words(
        &self,
        tokenizer: &HfTokenizer,
        cache: &mut WordCache,
        text: &str,
        ids: &mut Vec<u32>,
    ) -> tokenizers::Result<()> {
        let mut start = 0;
        while start < text.len() {
            let end = self.splitter.word_end(text, start);
            let word = &text.as_bytes()[start..end];
            if !cache.get(word, ids) {
                let first = ids.len();
                self.encode_word(tokenizer, word, ids)?;
                cache.insert(word, &ids[first..]);
            }
            start = end;
        }
        Ok(())
    }

    fn encode_word(
        &self,
        tokenizer: &HfTokenizer,
        word: &[u8],
        ids: &mut Vec<u32>,
    ) -> tokenizers::Result<()> {
        let mapped: String = word.iter().map(|b| self.byte_chars[*b as usize]).collect();
        let tokens = tokenizer.get_model().tokenize(&mapped)?;
        ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }
}

fn model(tokenizer: &HfTokenizer) -> Option<&BPE> {
    match tokenizer.get_model() {
        ModelWrapper::BPE(bpe) => Some(bpe),
        _ => None,
    }
}

/// GPT-2's `bytes_to_unicode`: printable Latin-1 bytes stand for themselves, the others for the
/// characters from U+0100 on.
fn byte_chars() -> [char; 256] {
    let mut next = 0x100u32;
    std::array::from_fn(|b| {
        let b = b as u8;
        if matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
            return b.into();
        }
        next += 1;
        char::from_u32(next - 1).unwrap_or_default()
    })
}

/// Tokens that are cut out of a text before it is split into words.
struct AddedTokens {
    /// Longest first: of those that start at one place, the longest counts.
    tokens: Vec<(String, u32)>,
    /// Whether a token starts with this byte.
    starts: [bool; 256],
}

impl AddedTokens {
    /// The added tokens of `tokenizer`; `None` if one of them is more than a plain string.
    fn new(tokenizer: &HfTokenizer) -> Option<Self> {
        let added = tokenizer.get_added_tokens_decoder();
        let plain = added
            .values()
            .all(|t| !t.single_word && !t.lstrip && !t.rstrip);
        // Normalised tokens are searched after the others, in what those leave.
        let normalized = added.values().filter(|t| t.normalized).count();
        if !plain || (normalized != 0 && normalized != added.len()) {
            return None;
        }
        let mut tokens: Vec<(String, u32)> = added
            .into_iter()
            .filter(|(_, token)| !token.content.is_empty())
            .map(|(id, token)| (token.content, id))
            .collect();
        tokens.sort_by_key(|(content, _)| std::cmp::Reverse(content.len()));
        let mut starts = [false; 256];
        for (content, _) in &tokens {
            starts[content.as_bytes()[0] as usize] = true;
        }
        Some(Self { tokens, starts })
    }

    /// The first of them in `text`: from, to, id.
    fn find(&self, text: &str) -> Option<(usize, usize, u32)> {
        let bytes = text.as_bytes();
        let mut at = 0;
        while let Some(skip) = bytes[at..].iter().position(|b| self.starts[*b as usize]) {
            at += skip;
            let here = &bytes[at..];
            let found = self
                .tokens
                .iter()
                .find(|(t, _)| here.starts_with(t.as_bytes()));
            if let Some((content, id)) = found {
                return Some((at, at + content.len(), *id));
            }
            at += 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Kind, Tokenizer, tests::gpt2};
    use crate::data::fixtures;

    /// The ids of the `tokenizers` crate's own pipeline.
    fn crates_own(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        let Kind::HuggingFace { inner, .. } = &tokenizer.kind else {
            panic!("not a BPE");
        };
        inner.encode_fast(text, false).unwrap().get_ids().to_vec()
    }

    #[test]
    fn the_fast_way_is_the_crates_on_real_text() {
        let tokenizer = gpt2();
        let mut encoder = tokenizer.encoder();
        let corpus = std::fs::read_to_string(fixtures::path("data/small.jsonl")).unwrap();
        for line in corpus.lines().chain([corpus.as_str()]) {
            let mut ids = Vec::new();
            encoder.encode_into(line, &mut ids).unwrap();
            assert_eq!(ids, crates_own(&tokenizer, line));
        }
    }

    #[test]
    fn every_code_point_is_split_as_the_crate_splits_it() {
        let tokenizer = gpt2();
        let mut encoder = tokenizer.encoder();
        // Planes without characters are one class throughout.
        let all = ('\0'..='\u{323af}').chain('\u{e0000}'..='\u{e01ff}');
        let all: Vec<char> = all.collect();
        for chars in all.chunks(4096) {
            let text: String = chars.iter().flat_map(|c| ['a', ' ', *c, '1', *c]).collect();
            let mut ids = Vec::new();
            encoder.encode_into(&text, &mut ids).unwrap();
            assert!(ids == crates_own(&tokenizer, &text), "from {:?}", chars[0]);
        }
    }

    #[test]
    fn added_tokens_are_cut_out_leftmost_and_longest() {
        let folder = tempfile::tempdir().unwrap();
        let Kind::HuggingFace { mut inner, .. } = gpt2().kind else {
            panic!("not a BPE");
        };
        let new = ["<a>", "<a><b>", "b>c", "ü"];
        inner
            .add_special_tokens(new.map(|t| tokenizers::AddedToken::from(t, true)))
            .unwrap();
        let file = folder.path().join("tokenizer.json");
        inner.save(&file, false).unwrap();
        let config = super::super::TokenizerConfig::HuggingFaceTokenizer {
            tokenizer_model: file,
            include_special_tokens: true,
        };
        let tokenizer = Tokenizer::new(&config).unwrap();
        assert!(tokenizer.is_fast());
        for text in [
            "<a><b>c",
            "<a<a> <a><b>>c",
            "x<b>c ü<a>",
            "<|endoftext|><|endof",
            "u\u{308}ü",
        ] {
            assert_eq!(
                tokenizer.encode(text).unwrap(),
                crates_own(&tokenizer, text),
                "{text}"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn the_fast_way_is_the_crates_on_any_text(
            texts in prop::collection::vec(
                prop_oneof![
                    any::<String>(),
                    "[a-zA-Z0-9 '’\\n\\t.,!?-]{0,80}",
                    "[ \\n\\t\\r\u{85}\u{a0}\u{2003}\u{3000}\u{200b}\u{1c}xé5']{0,40}",
                    "('(s|t|re|ve|m|ll|d|S|x| )| |<\\|endoftext\\|>|<\\||[\\PC]){0,30}",
                ],
                1..6,
            )
        ) {
            thread_local! {
                static GPT2: Tokenizer = gpt2();
            }
            GPT2.with(|tokenizer| {
                let mut encoder = tokenizer.encoder();
                // Twice: once through the model, once from the cache.
                for text in texts.iter().chain(&texts) {
                    let mut ids = Vec::new();
                    encoder.encode_into(text, &mut ids).unwrap();
                    prop_assert_eq!(ids, crates_own(tokenizer, text));
                }
                Ok(())
            })?;
        }
    }
}
