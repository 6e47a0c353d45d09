//! Words to ids, remembered: most words of a text were there before.
//!
//! An open-addressing table over two arenas. Against a map of boxed keys and values it saves an
//! allocation per word and two cache misses per look-up.

/// Longer words are rare, and not worth the room.
const MAX_WORD_BYTES: usize = 128;
/// At this many words, or bytes of words and ids, the table starts anew: a thread's cache stays
/// below some 100 MB whatever the text.
const MAX_WORDS: usize = 1 << 20;
const MAX_BYTES: usize = 64 << 20;
const FIRST_SLOTS: usize = 1 << 12;

/// The cache of one thread.
#[derive(Default)]
pub(super) struct WordCache {
    /// A power of two of slots, at most half of them used; none at first.
    slots: Vec<Slot>,
    words: Vec<u8>,
    ids: Vec<u32>,
    len: usize,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    hash: u32,
    word: u32,
    ids: u32,
    /// 0 in a free slot: no word is empty.
    word_bytes: u16,
    id_count: u16,
}

impl WordCache {
    /// Appends the ids of `word` to `out` if they are known.
    pub fn get(&self, word: &[u8], out: &mut Vec<u32>) -> bool {
        if self.slots.is_empty() {
            return false;
        }
        let slot = self.slots[self.find(word, hash(word))];
        if slot.word_bytes == 0 {
            return false;
        }
        let start = slot.ids as usize;
        match slot.id_count {
            1 => out.push(self.ids[start]),
            n => out.extend_from_slice(&self.ids[start..start + n as usize]),
        }
        true
    }

    /// Remembers the ids of a word that is not known yet, unless it is too long.
    pub fn insert(&mut self, word: &[u8], ids: &[u32]) {
        if word.is_empty() || word.len() > MAX_WORD_BYTES || ids.len() > MAX_WORD_BYTES {
            return;
        }
        if self.len >= MAX_WORDS || self.words.len() + 4 * self.ids.len() >= MAX_BYTES {
            *self = Self::default();
        }
        if 2 * (self.len + 1) > self.slots.len() {
            self.grow();
        }
        let hash = hash(word);
        let at = self.find(word, hash);
        self.slots[at] = Slot {
            hash,
            // Both are below MAX_BYTES.
            word: self.words.len() as u32,
            ids: self.ids.len() as u32,
            word_bytes: word.len() as u16,
            id_count: ids.len() as u16,
        };
        self.words.extend_from_slice(word);
        self.ids.extend_from_slice(ids);
        self.len += 1;
    }

    /// The slot of `word`, or the free one where it would go.
    fn find(&self, word: &[u8], hash: u32) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            let slot = &self.slots[at];
            if slot.word_bytes == 0 || (slot.hash == hash && self.word(slot) == word) {
                return at;
            }
            at = (at + 1) & mask;
        }
    }

    fn word(&self, slot: &Slot) -> &[u8] {
        let start = slot.word as usize;
        &self.words[start..start + slot.word_bytes as usize]
    }

    fn grow(&mut self) {
        let slots = (2 * self.slots.len()).max(FIRST_SLOTS);
        let old = std::mem::replace(&mut self.slots, vec![Slot::default(); slots]);
        for slot in old.into_iter().filter(|slot| slot.word_bytes > 0) {
            let mut at = slot.hash as usize & (slots - 1);
            while self.slots[at].word_bytes > 0 {
                at = (at + 1) & (slots - 1);
            }
            self.slots[at] = slot;
        }
    }
}

/// Multiply and fold, eight bytes at a time.
fn hash(word: &[u8]) -> u32 {
    const K: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |state: u64, value: u64| {
        let wide = u128::from(state ^ value) * u128::from(K);
        (wide as u64) ^ ((wide >> 64) as u64)
    };
    let (chunks, rest) = word.as_chunks::<8>();
    let mut state = word.len() as u64 ^ (K >> 1);
    for chunk in chunks {
        state = mix(state, u64::from_le_bytes(*chunk));
    }
    let mut last = 0;
    for b in rest {
        last = last << 8 | u64::from(*b);
    }
    (mix(state, last) >> 16) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn remembers_what_a_map_would() {
        let mut cache = WordCache::default();
        let mut map = HashMap::new();
        let mut found = Vec::new();
        assert!(!cache.get(b"x", &mut found));
        for i in 0..20_000u32 {
            let word = format!(
                "{}{}",
                "w".repeat(i as usize % 23),
                i.wrapping_mul(2_654_435_761)
            );
            let ids: Vec<u32> = (0..i % 5 + 1).map(|k| i + k).collect();
            if map.insert(word.clone(), ids.clone()).is_none() {
                assert!(!cache.get(word.as_bytes(), &mut found));
                cache.insert(word.as_bytes(), &ids);
            }
        }
        assert!(found.is_empty());
        for (word, ids) in &map {
            found.clear();
            assert!(cache.get(word.as_bytes(), &mut found));
            assert_eq!(&found, ids);
        }
    }

    #[test]
    fn leaves_long_words_out_and_starts_anew_when_full() {
        let mut cache = WordCache::default();
        let long = [b'a'; MAX_WORD_BYTES + 1];
        cache.insert(&long, &[1]);
        assert_eq!(cache.len, 0);
        for i in 0..MAX_WORDS + 10 {
            cache.insert(&i.to_le_bytes(), &[i as u32]);
        }
        assert_eq!(cache.len, 10);
        assert!(!cache.get(&0usize.to_le_bytes(), &mut Vec::new()));
        assert!(cache.get(&MAX_WORDS.to_le_bytes(), &mut Vec::new()));
    }
}
