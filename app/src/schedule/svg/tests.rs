use super::super::planned;
use super::*;
use burn_megatron::topology::PipelineSchedule;

#[test]
fn a_block_for_every_computation() {
    let planned = planned(PipelineSchedule::Interleaved, 4, 8, 2);
    let svg = svg(&planned.picture());
    let document = roxmltree::Document::parse(&svg).unwrap();
    let of = |class: &str| {
        let nodes = document.descendants();
        let found = nodes.filter(|node| node.attribute("class") == Some(class));
        found.count()
    };
    assert_eq!(["F", "B", "idle"].map(of), [4 * 8 * 2, 4 * 8 * 2, 4]);
    let numbers = document.descendants().filter(|node| {
        let number = node.text().is_some_and(|text| text == "7");
        number && node.has_tag_name("text")
    });
    assert_eq!(numbers.count(), 4 * 2 * 2, "each block says its number");
    assert!(svg.contains("bubble 18.8%"), "{svg}");
}

#[test]
fn narrow_blocks_have_no_number_and_titles_may_have_any() {
    let planned = planned(PipelineSchedule::GPipe, 2, 4000, 1);
    let picture = Picture {
        title: "a < b & c".into(),
        ..planned.picture()
    };
    let svg = svg(&picture);
    let document = roxmltree::Document::parse(&svg).unwrap();
    let root = document.root_element();
    let width: f64 = root.attribute("width").unwrap().parse().unwrap();
    assert!(width < 31_000.0);
    let title = root.first_element_child().unwrap();
    assert_eq!(title.text(), Some("a < b & c"));
    assert!(!svg.contains(">3999</text>"));
}
