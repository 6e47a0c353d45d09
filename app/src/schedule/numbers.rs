//! Numbers, ticks and the names of chunks, as the drawings write them.

use burn_megatron::topology::PipelineShape;

/// Four digits of a number, without zeros at the end: `1.5`, `33`, `0.0002`.
pub fn short(x: f64) -> String {
    if x == 0.0 {
        return "0".into();
    }
    let digits_before = x.abs().log10().floor() as i32 + 1;
    let decimals = (4 - digits_before).clamp(0, 12) as usize;
    let text = format!("{x:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').into(),
        false => text,
    }
}

/// `0.375` as `37.5%`.
pub fn percent(fraction: f64) -> String {
    format!("{:.1}%", 100.0 * fraction)
}

/// The least of 1, 2, 5, 10, 20, .. (and of 0.5, 0.2, ..) that is at least `x`.
pub fn round_up(x: f64) -> f64 {
    let power = 10f64.powf(x.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * power);
    // Against 1.9999999 where 2 is meant.
    let enough = |step: &f64| *step >= x * (1.0 - 1e-9);
    steps.into_iter().find(enough).unwrap_or(10.0 * power)
}

/// A chunk's letter: `a` to `z`, then `aa`, `ab`, ..
pub fn letters(chunk: usize) -> String {
    let last = char::from(b'a' + (chunk % 26) as u8);
    match chunk / 26 {
        0 => last.into(),
        more => format!("{}{last}", letters(more - 1)),
    }
}

/// The stages of a rank: `stages 0, 4`, or `stages 0, 4 .. 28` where there are many.
pub fn stages(shape: &PipelineShape, rank: usize) -> String {
    let stage = |chunk: usize| chunk * shape.ranks + rank;
    match shape.virtual_stages {
        1 => format!("stage {rank}"),
        v @ 2..=3 => {
            let list: Vec<String> = (0..v).map(|chunk| stage(chunk).to_string()).collect();
            format!("stages {}", list.join(", "))
        }
        v => format!("stages {}, {} .. {}", stage(0), stage(1), stage(v - 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (x, text) in [
            (0.0, "0"),
            (33.0, "33"),
            (1.5, "1.5"),
            (100.0, "100"),
            (1.0 / 3.0, "0.3333"),
            (2e-4, "0.0002"),
            (123_456.7, "123457"),
        ] {
            assert_eq!(short(x), text);
        }
        assert_eq!(percent(0.375), "37.5%");
    }

    #[test]
    fn ticks_are_round() {
        for (x, step) in [(1.0, 1.0), (1.1, 2.0), (3.0, 5.0), (6.0, 10.0), (0.3, 0.5)] {
            assert!((round_up(x) - step).abs() < 1e-12, "{x}");
        }
    }

    #[test]
    fn chunks_are_named() {
        assert_eq!([0, 1, 25, 26, 52].map(letters), ["a", "b", "z", "aa", "ba"]);
        let shape = |v| PipelineShape::new(4, 8).with_virtual_stages(v);
        assert_eq!(stages(&shape(1), 3), "stage 3");
        assert_eq!(stages(&shape(2), 3), "stages 3, 7");
        assert_eq!(stages(&shape(8), 0), "stages 0, 4 .. 28");
    }
}
