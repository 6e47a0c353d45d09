//! GPT-2's pre-tokenisation, by hand.
//!
//! The pattern, of GPT-2's `encoder.py`, is
//! `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`: its first
//! alternative that matches wins. It covers every text without gaps, so that splitting is a
//! function from where a word starts to where it ends. Character classes are those of the
//! `regex-syntax` crate, the tables behind the engine that the `tokenizers` crate runs the
//! pattern with: one Unicode version for both.

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

/// Anything that is not one of the others.
const OTHER: u8 = 0;
/// `\p{L}`
const LETTER: u8 = 1;
/// `\p{N}`
const NUMBER: u8 = 2;
/// `\s`
const SPACE: u8 = 3;

/// The class of each code point: 1.1 MB, of which texts touch little.
static CLASSES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut classes = vec![OTHER; char::MAX as usize + 1];
    for (pattern, class) in [(r"\p{L}", LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE)] {
        for (start, end) in code_points(pattern) {
            classes[start as usize..=end as usize].fill(class);
        }
    }
    classes
});

/// The classes of ASCII, where nearly all text is.
const ASCII: [u8; 128] = {
    let mut classes = [OTHER; 128];
    let mut b = 0;
    while b < 128 {
        classes[b] = match b as u8 {
            b'a'..=b'z' | b'A'..=b'Z' => LETTER,
            b'0'..=b'9' => NUMBER,
            b'\t'..=b'\r' | b' ' => SPACE,
            _ => OTHER,
        };
        b += 1;
    }
    classes
};

/// The code point ranges that a one-character pattern matches.
fn code_points(pattern: &str) -> Vec<(char, char)> {
    let hir = regex_syntax::parse(pattern).expect("a pattern of this file is valid");
    match hir.kind() {
        HirKind::Class(Class::Unicode(class)) => {
            class.iter().map(|r| (r.start(), r.end())).collect()
        }
        other => unreachable!("{pattern} is a class of characters, not {other:?}"),
    }
}

/// Splits texts into words.
#[derive(Clone, Copy)]
pub(super) struct Splitter {
    classes: &'static [u8],
}

impl Splitter {
    pub fn new() -> Self {
        Self { classes: &CLASSES }
    }

    /// Where the word that starts at byte `start` of `text` ends; `start` is within it, on a
    /// character.
    pub fn word_end(self, text: &str, start: usize) -> usize {
        let bytes = text.as_bytes();
        if bytes[start] == b'\''
            && let Some(length) = contraction(&bytes[start + 1..])
        {
            return start + 1 + length;
        }
        let (class, length) = self.class_at(text, start);
        if class != SPACE {
            return self.run_end(text, start + length, class);
        }
        // A blank (no other space) belongs to the word that follows it.
        if bytes[start] == b' ' && start + 1 < bytes.len() {
            let (next, length) = self.class_at(text, start + 1);
            if next != SPACE {
                return self.run_end(text, start + 1 + length, next);
            }
        }
        self.spaces_end(text, start, length)
    }

    /// `\s+(?!\S)|\s+`: a run of spaces leaves its last one to the word that follows, unless it
    /// is the only one.
    fn spaces_end(self, text: &str, start: usize, first: usize) -> usize {
        let mut last = start;
        let mut end = start + first;
        while end < text.len() {
            let (class, length) = self.class_at(text, end);
            if class != SPACE {
                return if last > start { last } else { end };
            }
            last = end;
            end += length;
        }
        end
    }

    /// The end of the run of `class` that `at` stands in or behind.
    fn run_end(self, text: &str, mut at: usize, class: u8) -> usize {
        let bytes = text.as_bytes();
        while at < bytes.len() {
            let b = bytes[at];
            if b < 128 {
                if ASCII[b as usize] != class {
                    break;
                }
                at += 1;
            } else {
                let (this, length) = self.class_at(text, at);
                if this != class {
                    break;
                }
                at += length;
            }
        }
        at
    }

    /// The class and the bytes of the character at `at`.
    fn class_at(self, text: &str, at: usize) -> (u8, usize) {
        let b = text.as_bytes()[at];
        if b < 128 {
            return (ASCII[b as usize], 1);
        }
        match text[at..].chars().next() {
            Some(c) => (self.classes[c as usize], c.len_utf8()),
            None => (OTHER, 1),
        }
    }
}

/// Bytes of the contraction after an apostrophe, if there is one.
fn contraction(after: &[u8]) -> Option<usize> {
    match after {
        [b's' | b't' | b'm' | b'd', ..] => Some(1),
        [b'r', b'e', ..] | [b'v', b'e', ..] | [b'l', b'l', ..] => Some(2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<&str> {
        let splitter = Splitter::new();
        let (mut start, mut words) = (0, Vec::new());
        while start < text.len() {
            let end = splitter.word_end(text, start);
            words.push(&text[start..end]);
            start = end;
        }
        words
    }

    #[test]
    fn splits_as_the_pattern_says() {
        assert_eq!(
            words("It's we'll IT'S 'tis"),
            ["It", "'s", " we", "'ll", " IT", "'", "S", " '", "tis"]
        );
        assert_eq!(
            words("a  b\n\nc \n d"),
            ["a", " ", " b", "\n", "\n", "c", " \n", " d"]
        );
        assert_eq!(
            words("x = 12.5%   "),
            ["x", " =", " 12", ".", "5", "%", "   "]
        );
        assert_eq!(
            words("\tx\u{a0}y \u{3000}z"),
            ["\t", "x", "\u{a0}", "y", " ", "\u{3000}", "z"]
        );
        assert_eq!(words("naïve ½²x"), ["naïve", " ½²", "x"]);
        assert_eq!(words(" 's 's"), [" '", "s", " '", "s"]);
        assert!(words("").is_empty());
    }

    #[test]
    fn ascii_agrees_with_the_unicode_tables() {
        for (b, class) in ASCII.iter().enumerate() {
            assert_eq!(CLASSES[b], *class, "{b}");
        }
    }
}
